"""The numbers of a report, from the committed shards: one row group in memory at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.errors import PipelineError
from pipeline.inspect_run import teacher_entropy
from pipeline.prompt_rows import source_group
from pipeline.report.counts import FloatArray, IntArray, IntCounts, PositionMeans
from pipeline.report.samples import Sample, Sampler
from pipeline.report.scripts import UNKNOWN, script_of
from pipeline.report.shares import Share, products
from pipeline.report.vectors import VectorStats, VectorTotals
from pipeline.validate.folder import open_run
from pipeline.validate.group import BoolArray, Group
from pipeline.validate.reading import read_group
from pipeline.validate.report import NotChecked
from pipeline.validate.shard import ShardFile, files_of, first_line

# Sources and scripts listed; what comes after counts as OTHERS, so memory stays bounded.
NAMES_KEPT = 100
OTHERS = "all others"


class Agreement(NamedTuple):
    """Of what the target model generated: supervised tokens and whole answers, and how many of
    them the teacher's arg-max gives as well."""

    tokens: int = 0
    token_hits: int = 0
    answers: int = 0
    answer_hits: int = 0

    @property
    def token_share(self) -> float | None:
        return self.token_hits / self.tokens if self.tokens else None

    @property
    def answer_share(self) -> float | None:
        return self.answer_hits / self.answers if self.answers else None


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What `collect` finds in the shards.

    in_answer, in_row: means of entropy (nats), top-1 mass and top-k mass of the teacher rows that
    predict a supervised token, by that token's index in its answer and by the row's own index t.
    degenerate: rows whose last answer loops.
    """

    sources: dict[str, Share]
    scripts: dict[str, Share]
    total: Share
    lengths: IntCounts
    offsets: IntCounts
    last_positions: IntCounts
    agreement: Agreement
    degenerate: int
    in_answer: PositionMeans
    in_row: PositionMeans
    vectors: tuple[VectorStats, ...]
    samples: tuple[Sample, ...]


def collect(path: Path) -> Statistics:
    """Read every row of the shards of OUT, OUT/data or a directory with just shards.

    Raises PipelineError where there are none, or one cannot be read.
    """
    run = open_run(path)
    files = files_of(run)
    texts = _Texts(file for file in files if file.kind == "rollout")
    totals = _Totals()
    for file in files:
        if file.kind == "shard":
            _open(file)
            if file.kind == "shard":  # a loose file's kind is known only now
                for group, disk_bytes in _groups(file):
                    try:
                        totals.add(group, disk_bytes, texts)
                    except NotChecked as error:
                        raise _unreadable(file, first_line(error)) from error
            file.close()
    if not totals.lengths.total:
        raise PipelineError(f"{path}: no finished shard to report on")
    return totals.finish()


def _open(file: ShardFile) -> None:
    file.open()
    if file.layout is None or file.parquet is None:
        why = file.parquet_error or file.footer_error or file.layout_error
        raise _unreadable(file, why)


def _groups(file: ShardFile, only: Sequence[str] | None = None) -> Iterator[tuple[Group, int]]:
    """Each row group that has rows, and its compressed bytes. Raises PipelineError."""
    metadata, first_row = file.need_parquet().metadata, 0
    for index in range(metadata.num_row_groups):
        if rows := metadata.row_group(index).num_rows:
            try:
                group = read_group(file, index, first_row, only=only)
            except (NotChecked, pa.ArrowException, OSError) as error:
                raise _unreadable(file, first_line(error)) from error
            for problem in (p for problems in group.trouble.values() for p in problems):
                raise _unreadable(file, f"{problem.column}: {problem.found}")
            chunks = metadata.row_group(index)  # safe only now that it was read: see `leaves`
            columns = (chunks.column(i) for i in range(chunks.num_columns))
            yield group, sum(column.total_compressed_size for column in columns)
            first_row += rows


def _unreadable(file: ShardFile, why: str) -> PipelineError:
    return PipelineError(f"{file.path}: {why}; `pipeline validate` lists all that is wrong")


class _Texts:
    """The rollouts' texts beside the shards' rows: both are in one order, but for rejected rows."""

    def __init__(self, files: Iterator[ShardFile]) -> None:
        self._rows = self._read(files)

    @staticmethod
    def _read(files: Iterator[ShardFile]) -> Iterator[tuple[str, str]]:
        for file in files:
            _open(file)
            # An array column, too: without one a group has no rows.
            for group, _ in _groups(file, ("sample_id", "text", "loss_mask")):
                yield from zip(group.row_ids, group.scalar("text"), strict=True)
            file.close()

    def script(self, sample_id: str) -> str:
        """The script of a row; rows must be asked for in order."""
        for row_id, text in self._rows:
            if row_id == sample_id:
                return script_of(text)
        return UNKNOWN


class _Totals:
    def __init__(self) -> None:
        self.sources: dict[str, Share] = defaultdict(Share)
        self.scripts: dict[str, Share] = defaultdict(Share)
        self.lengths, self.offsets, self.last = IntCounts(), IntCounts(), IntCounts()
        self.agreement = Agreement()
        self.degenerate = 0
        self.in_answer, self.in_row = PositionMeans(3), PositionMeans(3)
        self.vectors: dict[str, VectorTotals] = {}
        self.sampler = Sampler()

    def add(self, group: Group, disk_bytes: int, texts: _Texts) -> None:
        offsets = group.scalar("position_offset").astype(np.int64)
        self.lengths.add(group.lengths)
        self.offsets.add(offsets)
        self.last.add(offsets + group.lengths - 1)
        self.degenerate += int(np.count_nonzero(group.scalar("degenerate")))
        self.sampler.add(group)
        mask = group.array("loss_mask") != 0
        index = np.arange(group.tokens) - group.starts[group.row_of]
        logprobs = group.array("teacher_top_logprobs").astype(np.float64)
        top1 = np.exp(logprobs[:, 0])
        self._add_teacher(group, mask, index, logprobs, top1)
        self._add_shares(group, disk_bytes, mask, top1, texts)
        for column in group.file.need_layout().columns:
            if column.axes and (column.axes[-1] == "hidden" or column.axes[-1].endswith("_dim")):
                totals = self.vectors.setdefault(column.name, VectorTotals(column))
                totals.add(group.array(column.name), group.row_ids, group.row_of, index)

    def _add_teacher(
        self,
        group: Group,
        mask: BoolArray,
        index: IntArray,
        logprobs: FloatArray,
        top1: FloatArray,
    ) -> None:
        predicts = np.flatnonzero(mask[1:] & group.same_row)  # row t predicts supervised t + 1
        answer = spans(mask, group.row_of)
        quantities = (
            teacher_entropy(group.array("teacher_top_logprobs"), group.array("teacher_tail_mass"))[
                predicts
            ],
            top1[predicts],
            np.exp(logprobs[predicts]).sum(axis=1),
        )
        firsts = np.flatnonzero(mask & (np.diff(answer, prepend=-1) != 0))
        self.in_row.add(index[predicts], *quantities)
        self.in_answer.add(predicts + 1 - firsts[answer[predicts + 1]], *quantities)
        own = predicts[group.scalar("on_policy")[group.row_of[predicts]] != 0]
        hits = group.array("teacher_top_ids")[own, 0] == group.array("input_ids")[own + 1]
        of_answer = answer[own + 1]
        missed = np.unique(of_answer[~hits])
        answers = len(np.unique(of_answer))
        found = (len(own), int(hits.sum()), answers, answers - len(missed))
        self.agreement = Agreement(*(a + b for a, b in zip(self.agreement, found, strict=True)))

    def _add_shares(
        self, group: Group, disk_bytes: int, mask: BoolArray, top1: FloatArray, texts: _Texts
    ) -> None:
        sums, starts = products(top1, mask, group.row_of, group.rows)
        supervised = np.bincount(group.row_of, weights=mask, minlength=group.rows)
        for row, sample_id in enumerate(group.row_ids):
            share = Share(
                rows=1,
                tokens=int(group.lengths[row]),
                supervised=int(supervised[row]),
                disk_bytes=disk_bytes * group.lengths[row] / max(1, group.tokens),
                product_sums=sums[row],
                starts=starts[row],
            )
            for shares, name in (
                (self.sources, source_group(group.scalar("source")[row])),
                (self.scripts, texts.script(sample_id)),
            ):
                kept = name if name in shares or len(shares) < NAMES_KEPT else OTHERS
                shares[kept] += share

    def finish(self) -> Statistics:
        return Statistics(
            sources=_largest_first(self.sources),
            scripts=_largest_first(self.scripts),
            total=sum(self.sources.values(), Share()),
            lengths=self.lengths,
            offsets=self.offsets,
            last_positions=self.last,
            agreement=self.agreement,
            degenerate=self.degenerate,
            in_answer=self.in_answer,
            in_row=self.in_row,
            vectors=tuple(s for totals in self.vectors.values() for s in totals.finish()),
            samples=self.sampler.finish(),
        )


def spans(mask: BoolArray, row_of: IntArray) -> IntArray:
    """The answer of each supervised token, numbered from 0; -1 for the others.

    mask: bool [N]; row_of: int64 [N]. An answer is an unbroken run of supervised tokens of a row.
    """
    before = np.concatenate([[False], mask[:-1] & (row_of[1:] == row_of[:-1])])[: len(mask)]
    numbers = np.cumsum(mask & ~before) - 1
    return np.where(mask, numbers, -1)


def _largest_first(shares: dict[str, Share]) -> dict[str, Share]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1].tokens, item[0])))
