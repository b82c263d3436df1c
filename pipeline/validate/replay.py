"""`pipeline validate --replay N`: random rows again through the target model, column by column.

A row runs in its own micro-batch, at its recorded offset, on the recorded backend, so that the same
machine gives the same bits; the tolerances are for other machines, other builds, and batch mates
that were rejected since. This is the only part of validation that needs torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.batches import micro_batches
from pipeline.errors import PipelineError, RowReject
from pipeline.features import feature_columns
from pipeline.memory import halving
from pipeline.models.base import PositionedRow, TargetModel, TeacherRows
from pipeline.models.load import TargetFiles, find_target, load_target
from pipeline.rollout import longest_row
from pipeline.schema import FLOAT_DTYPES, BoundColumn, Layout
from pipeline.settings import Settings
from pipeline.shards import row_arrays
from pipeline.validate.folder import Manifest, open_run
from pipeline.validate.report import NotChecked, Problem, Rule, Worst
from pipeline.validate.shard import ShardFile, files_of

# How far one value may be off, in units of max(|value|, RMS of the row's column): a few roundings
# of the column's own dtype. A batch mate moves llama.cpp's float32 results by about 2e-4.
TOLERANCES = {"bfloat16": 2**-5, "float16": 2**-7, "float32": 2**-9}
# Log-probabilities come from logits in the model's dtype, whose roundings do not shrink with them:
# in nats, by the dtype the model runs in.
LOGPROB_TOLERANCES = {"bfloat16": 0.25, "float16": 0.05, "float32": 0.01}
# Tokens were picked one by one and are checked all at once, which rounds otherwise, so near ties
# may go the other way; in nats.
GREEDY_MARGINS = {"bfloat16": 0.5, "float16": 0.1, "float32": 0.02}
# It rounds activations to 8 bits, whatever --dtype says: 0.35 was seen on SmolLM2-135M's Q4_1.
LLAMACPP_MARGIN = 1.0


@dataclass(kw_only=True)
class ReplayedRow:
    """A stored row and the same row computed again.

    drawn: it was asked for, rather than in the micro-batch of one that was.
    unshifted: of a drawn row whose answers are greedy, teacher rows at position 0, where they were
    generated.
    """

    file: str
    row_id: str
    drawn: bool
    layout: Layout
    stored: dict[str, Any]
    again: dict[str, npt.NDArray[Any]]
    unshifted: TeacherRows | None
    margin: float
    logprob_tolerance: float
    worst: dict[str, Worst] = field(default_factory=dict)

    def problem(self, column: str, index: tuple[int, ...], found: str, expected: str) -> Problem:
        return Problem(
            file=self.file,
            row=self.row_id,
            column=column,
            index=index,
            found=found,
            expected=expected,
        )


def columns_agree(row: ReplayedRow) -> Iterator[Problem]:
    """Every array column holds what the target model gives again."""
    for column in row.layout.columns:
        if not column.shape:
            continue
        stored, again = row.stored[column.name], row.again[column.name]
        if column.name == "teacher_top_ids":
            yield from _top_ids_agree(row)
        elif column.dtype not in FLOAT_DTYPES:
            yield from _first(row, column.name, stored != again, stored, again)
        else:
            errors = np.abs(stored.astype(np.float64) - again) / _allowed(row, column, again)
            worst = float(np.nanmax(errors, initial=0.0))
            row.worst[column.name] = Worst(worst, row.row_id)
            yield from _first(row, column.name, ~(errors <= 1), stored, again)


def greedy_tokens(row: ReplayedRow) -> Iterator[Problem]:
    """Each generated token is the likeliest one, or as likely but for rounding."""
    if row.unshifted is None:
        raise NotChecked("only drawn rows that the scoring backend generated greedily are checked")
    ids, mask = row.stored["input_ids"], row.stored["loss_mask"]
    best = row.unshifted.top_logprobs[:-1, 0].numpy()
    gap = best - row.unshifted.token_logprobs[1:].numpy()
    gap = np.where(mask[1:] == 1, gap, 0.0)
    row.worst["greedy input_ids"] = Worst(float(gap.max(initial=0.0)) / row.margin, row.row_id)
    for t in np.flatnonzero(gap > row.margin)[:1].tolist():
        yield row.problem(
            "input_ids",
            (t + 1,),
            f"token {ids[t + 1]}, {gap[t]:.2f} nats below the likeliest",
            f"token {int(row.unshifted.top_ids[t, 0])}, the target model's own arg-max",
        )


REPLAY_RULES: tuple[Rule[ReplayedRow], ...] = (
    Rule(
        id="replay.columns",
        requires="random rows come out of the target model again as they are stored",
        remedy="do not train on these shards: they are not this target model's features",
        check=columns_agree,
    ),
    Rule(
        id="replay.greedy",
        requires="greedily generated tokens are the target model's own arg-max",
        remedy="do not train on these shards: their answers are not this target model's",
        check=greedy_tokens,
    ),
)


def replay_rows(out: str | Path, target: str, count: int, seed: int) -> Iterator[ReplayedRow]:
    """Yield `count` random rows of a run, and their batch mates, with what the target model gives.

    A row is computed in its own micro-batch, so the rows beside it cost nothing more.

    Raises PipelineError if `out` is no run or `target` is not the target model it was made from.
    """
    run = open_run(out)
    manifest = run.manifest
    if manifest is None:
        raise PipelineError(f"{out}: --replay needs manifest.json ({run.manifest_error})")
    files = find_target(target)
    _check_same(files, manifest, target)
    settings = Settings.check(**{**manifest.settings, "out": str(run.root), "target": target})
    backend = str(manifest.fingerprint_fields["backend"])
    model = _load(files, settings, manifest, backend)
    shards = [file for file in files_of(run) if file.kind == "shard"]
    for file, wanted in _choose(shards, count, seed):
        yield from _replay_file(file, wanted, model, settings, manifest)


def _check_same(files: TargetFiles, manifest: Manifest, target: str) -> None:
    recorded = manifest.fingerprint_fields.get("target_sha256")
    if files.sha256() != recorded:
        raise PipelineError(
            f"--target {target}: its sha256 is not {recorded}, that of the target model these "
            "shards were made from"
        )


def _load(files: TargetFiles, settings: Settings, manifest: Manifest, backend: str) -> TargetModel:
    import torch

    return load_target(
        files,
        backend=backend,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        device="cuda:0" if torch.cuda.is_available() else "cpu",
        threads=settings.threads,
        max_length=longest_row(settings, manifest.geometry),
        eos_ids=frozenset(manifest.fingerprint_fields["eos_ids"]),
    )


def _choose(
    shards: list[ShardFile], count: int, seed: int
) -> Iterator[tuple[ShardFile, list[int]]]:
    """Random rows, each as likely, by the records' row counts: file by file, row numbers in it."""
    rows = np.array([file.record.rows if file.record else 0 for file in shards], dtype=np.int64)
    total = int(rows.sum())
    chosen = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    ends = np.cumsum(rows)
    for i, file in enumerate(shards):
        inside = chosen[(chosen < ends[i]) & (chosen >= ends[i] - rows[i])] - (ends[i] - rows[i])
        if inside.size:
            yield file, sorted(inside.tolist())


def _replay_file(
    file: ShardFile, wanted: list[int], model: TargetModel, settings: Settings, manifest: Manifest
) -> Iterator[ReplayedRow]:
    file.open()
    parquet, layout = file.need_parquet(), file.need_layout()
    first = 0
    for group in range(parquet.metadata.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        inside = [row - first for row in wanted if first <= row < first + rows]
        first += rows
        if not inside:
            continue
        table = parquet.read_row_group(group, columns=[c.name for c in layout.columns])
        columns = {c.name: row_arrays(table[c.name], c) for c in layout.columns}
        for batch in micro_batches(columns["num_tokens"], settings.batch_tokens):
            if not set(batch).isdisjoint(inside):
                yield from _replay_batch(file, batch, inside, columns, model, settings, manifest)
    file.close()


def _replay_batch(
    file: ShardFile,
    batch: list[int],
    inside: list[int],
    columns: dict[str, list[Any]],
    model: TargetModel,
    settings: Settings,
    manifest: Manifest,
) -> Iterator[ReplayedRow]:
    layout = file.need_layout()
    positioned = [
        PositionedRow(columns["input_ids"][i], columns["position_offset"][i]) for i in batch
    ]
    outputs = halving(
        lambda some: model.forward(some, top_k=settings.topk, block_layers=layout.block_layers),
        positioned,
    )
    llamacpp = model.backend == "llamacpp"
    own_answers = manifest.fingerprint_fields.get("generated_by", model.backend) == model.backend
    for i, output in zip(batch, outputs, strict=True):
        if isinstance(output, RowReject):
            raise PipelineError(f"--replay: {output.detail}")
        drawn = i in inside
        stored = {name: values[i] for name, values in columns.items()}
        greedy = drawn and settings.temperature == 0 and stored["on_policy"] == 1 and own_answers
        alone = [PositionedRow(stored["input_ids"], 0)]
        yield ReplayedRow(
            file=file.name,
            row_id=stored["sample_id"],
            drawn=drawn,
            layout=layout,
            stored=stored,
            again=feature_columns(output, stored["input_ids"], stored["loss_mask"], layout),
            unshifted=model.forward(alone, top_k=1)[0].teacher if greedy else None,
            margin=LLAMACPP_MARGIN if llamacpp else GREEDY_MARGINS[settings.dtype],
            logprob_tolerance=LOGPROB_TOLERANCES["float16" if llamacpp else settings.dtype],
        )


def _allowed(row: ReplayedRow, column: BoundColumn, again: npt.NDArray[Any]) -> Any:
    """How far off each value may be."""
    if column.name in ("token_logprobs", "teacher_top_logprobs"):
        return row.logprob_tolerance
    if column.name == "teacher_tail_mass":
        return row.logprob_tolerance / 4  # of a mass in [0, 1]
    rms = np.sqrt(np.mean(np.square(again, dtype=np.float64)))
    return TOLERANCES[column.dtype] * np.maximum(np.abs(again), rms)


def _top_ids_agree(row: ReplayedRow) -> Iterator[Problem]:
    """Ids may swap places where their log-probabilities are the same but for rounding."""
    stored, again = row.stored["teacher_top_ids"], row.again["teacher_top_ids"]
    values = row.again["teacher_top_logprobs"]
    same = stored[:, :, None] == again[:, None, :]  # [T, K, K]
    found = same.any(-1)
    there = np.take_along_axis(values, same.argmax(-1), axis=1)
    there = np.where(found, there, values[:, -1:])  # one that dropped out was near the last
    moved = np.abs(there - values) > row.logprob_tolerance
    yield from _first(row, "teacher_top_ids", (stored != again) & moved, stored, again)


def _first(
    row: ReplayedRow, column: str, broken: npt.NDArray[np.bool_], stored: Any, again: Any
) -> Iterator[Problem]:
    """A problem for the first broken place of a column."""
    if broken.any():
        index = tuple(int(i) for i in np.argwhere(broken)[0])
        problem = row.problem(column, index, str(stored[index]), f"{again[index]}, replayed")
        yield Problem(**{**vars(problem), "places": int(broken.sum())})
