"""`pipeline inspect`: what a run holds, in numbers. Reads the small columns only; no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import PipelineError
from pipeline.validate.folder import RunView, open_run
from pipeline.validate.group import Group
from pipeline.validate.reading import read_group
from pipeline.validate.report import NotChecked
from pipeline.validate.shard import ShardFile, files_of, first_line

SPREAD_BINS = 24
# All that the numbers below come from: a few percent of a shard's bytes.
_READ = (
    "num_tokens",
    "position_offset",
    "finish_reason",
    "on_policy",
    "input_ids",
    "loss_mask",
    "teacher_top_ids",
    "teacher_top_logprobs",
    "teacher_tail_mass",
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest, middle and largest of a number over the rows.

    histogram: how many rows lie in each of SPREAD_BINS equal parts from min to max.
    """

    min: int
    median: float
    max: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> "Spread | None":
        if not len(values):
            return None
        low, high = int(values.min()), int(values.max())
        counts, _ = np.histogram(values, bins=SPREAD_BINS, range=(low, max(high, low + 1)))
        return cls(
            min=low,
            median=float(np.median(values)),
            max=high,
            histogram=tuple(counts.tolist()),
        )


@dataclass(frozen=True, kw_only=True)
class ColumnSize:
    """disk_bytes: in the shards, compressed; logical_bytes: of an array column's values in its own
    dtype, None for the scalar columns."""

    name: str
    dtype: str
    shape: str
    disk_bytes: int
    logical_bytes: int | None

    @property
    def ratio(self) -> float | None:
        return None if self.logical_bytes is None else _ratio(self.logical_bytes, self.disk_bytes)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What `inspect_run` found in the shards.

    disk_bytes: of the shard files; logical_bytes: of the array values in their own dtypes.
    entropy_nats, entropy_supervised_nats: mean entropy of the teacher rows, and of those whose
    next token is supervised. All tokens outside the top k count as one outcome of probability
    teacher_tail_mass, so it is a lower bound of the full distribution's entropy.
    argmax_share: of the supervised tokens after the first, those that equal the arg-max of the
    teacher row before them.
    """

    path: str
    complete: bool | None
    shards: int
    rows: int
    tokens: int
    supervised_tokens: int
    disk_bytes: int
    logical_bytes: int
    context_length: int
    num_tokens: Spread | None
    position_offset: Spread | None
    last_position: Spread | None
    finish_reasons: dict[str, int]
    on_policy: dict[str, int]
    entropy_nats: float | None
    entropy_supervised_nats: float | None
    argmax_share: float | None
    rejects: dict[str, int] | None
    columns: tuple[ColumnSize, ...]

    @property
    def bytes_per_token(self) -> float | None:
        return _ratio(self.disk_bytes, self.tokens)

    @property
    def ratio(self) -> float | None:
        return _ratio(self.logical_bytes, self.disk_bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers are finite, or None where there is nothing to average."""
        columns = [{**asdict(column), "ratio": column.ratio} for column in self.columns]
        derived = {"bytes_per_token": self.bytes_per_token, "ratio": self.ratio}
        return {**asdict(self), **derived, "columns": columns}


class _Totals:
    """Sums over row groups."""

    def __init__(self) -> None:
        self.lengths: list[npt.NDArray[np.int64]] = []
        self.offsets: list[npt.NDArray[np.int64]] = []
        self.finish: Counter[str] = Counter()
        self.policy: Counter[str] = Counter()
        self.supervised = self.predicted = self.argmax_hits = 0
        self.entropy = self.entropy_supervised = 0.0

    def add(self, group: Group) -> None:
        self.lengths.append(group.lengths)
        self.offsets.append(group.scalar("position_offset").astype(np.int64))
        self.finish.update(group.scalar("finish_reason"))
        self.policy.update(map(str, group.scalar("on_policy").tolist()))
        mask = group.array("loss_mask") != 0
        self.supervised += int(mask.sum())
        entropy = teacher_entropy(
            group.array("teacher_top_logprobs"), group.array("teacher_tail_mass")
        )
        predicts = mask[1:] & group.same_row  # row t-1 predicts the supervised token t
        argmax = group.array("teacher_top_ids")[:-1, 0]
        self.predicted += int(predicts.sum())
        self.argmax_hits += int((predicts & (argmax == group.array("input_ids")[1:])).sum())
        self.entropy += float(entropy.sum())
        self.entropy_supervised += float(entropy[:-1][predicts].sum())


def teacher_entropy(
    top_logprobs: npt.NDArray[np.float32], tail_mass: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Entropy of each teacher row in nats, float64 [N]; the tail is one outcome.

    top_logprobs: float32 [N, K]; tail_mass: float32 [N]. A lower bound: spreading the tail over
    its tokens could only add to it.
    """
    logprobs = top_logprobs.astype(np.float64)
    tail = tail_mass.astype(np.float64)
    tail_log = np.log(tail, out=np.zeros_like(tail), where=tail > 0)
    entropy: npt.NDArray[np.float64] = -(np.exp(logprobs) * logprobs).sum(axis=1) - tail * tail_log
    return entropy


def inspect_run(path: Path) -> Inspection:
    """Read the shards of OUT, OUT/data or a directory with just shards.

    Raises PipelineError where there are none, or one cannot be read (`pipeline validate` says
    what is wrong with it).
    """
    run = open_run(path)
    files = files_of(run)
    totals = _Totals()
    disk: Counter[str] = Counter()
    shards = []
    for file in files:
        file.open()
        if file.layout is None or file.parquet is None:
            why = file.parquet_error or file.footer_error or file.layout_error
            raise _unreadable(file, why)
        if file.kind == "shard":
            shards.append(file)
            _add_file(file, totals)
            _add_sizes(file, disk)
        file.close()
    if not shards:
        raise PipelineError(f"{path}: no finished shard to inspect")
    return _inspection(path, run, shards, totals, disk)


def _add_file(file: ShardFile, totals: _Totals) -> None:
    metadata, first_row = file.need_parquet().metadata, 0
    for index in range(metadata.num_row_groups):
        if rows := metadata.row_group(index).num_rows:
            try:
                totals.add(read_group(file, index, first_row, only=_READ))
            except (NotChecked, pa.ArrowException, OSError) as error:
                raise _unreadable(file, first_line(error)) from error
            first_row += rows


def _unreadable(file: ShardFile, why: str) -> PipelineError:
    return PipelineError(f"{file.path}: {why}; `pipeline validate` lists all that is wrong")


def _add_sizes(file: ShardFile, disk: Counter[str]) -> None:
    """Add the compressed bytes of each column of a file, all its leaves and row groups."""
    parquet = file.need_parquet()
    try:
        for index in range(parquet.metadata.num_row_groups):
            # One row of each column: `leaves` may be asked only for what could be read.
            next(parquet.iter_batches(batch_size=1, row_groups=[index]), None)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, first_line(error)) from error
    for path, leaf in file.leaves():
        disk[path.partition(".")[0]] += leaf.total_compressed_size


def _column_sizes(file: ShardFile, disk: Counter[str], tokens: int) -> tuple[ColumnSize, ...]:
    return tuple(
        ColumnSize(
            name=column.name,
            dtype=column.dtype,
            shape=", ".join("T" if size is None else str(size) for size in column.shape),
            disk_bytes=disk[column.name],
            logical_bytes=column.bytes_per_token * tokens if column.shape else None,
        )
        for column in file.need_layout().columns
    )


def _inspection(
    path: Path,
    run: RunView,
    shards: Sequence[ShardFile],
    totals: _Totals,
    disk: Counter[str],
) -> Inspection:
    none = [np.zeros(0, dtype=np.int64)]
    lengths = np.concatenate(totals.lengths or none)
    offsets = np.concatenate(totals.offsets or none)
    tokens = int(lengths.sum())
    columns = _column_sizes(shards[0], disk, tokens)
    return Inspection(
        path=str(path),
        complete=None if run.manifest is None else run.manifest.complete,
        shards=len(shards),
        rows=len(lengths),
        tokens=tokens,
        supervised_tokens=totals.supervised,
        disk_bytes=sum(file.path.stat().st_size for file in shards),
        logical_bytes=sum(column.logical_bytes or 0 for column in columns),
        context_length=shards[0].need_footer().geometry.context_length,
        num_tokens=Spread.of(lengths),
        position_offset=Spread.of(offsets),
        last_position=Spread.of(offsets + lengths - 1),
        finish_reasons=dict(sorted(totals.finish.items())),
        on_policy=dict(sorted(totals.policy.items())),
        entropy_nats=_ratio(totals.entropy, tokens),
        entropy_supervised_nats=_ratio(totals.entropy_supervised, totals.predicted),
        argmax_share=_ratio(totals.argmax_hits, totals.predicted),
        rejects=None if run.manifest is None else dict(sorted(run.manifest.rejected.items())),
        columns=columns,
    )


def _ratio(value: float, by: float) -> float | None:
    return value / by if by and np.isfinite(value) else None
