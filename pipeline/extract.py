"""Stage 2, one shard: rollout rows in, one Parquet file of features and its record out."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from pipeline.errors import RowReject
from pipeline.features import feature_columns
from pipeline.geometry import Geometry
from pipeline.manifest import Commit, Reject, RunFolder, make_commit
from pipeline.memory import halving
from pipeline.models.base import PositionedRow, TargetModel
from pipeline.schema import Layout
from pipeline.seeds import position_offset
from pipeline.settings import Settings
from pipeline.shards import ROW_GROUP_BYTES, Row, ShardWriter, ids_sha256, row_arrays
from pipeline.tasks import ShardTask


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group rows so that rows x longest row stays within `budget` tokens; like lengths together.

    Returns indices into `lengths`. A row longer than the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        # Longest first, so the first row of a batch is its width.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def extract_shard(
    task: ShardTask,
    *,
    target: TargetModel,
    layout: Layout,
    rollout_layout: Layout,
    settings: Settings,
    folder: RunFolder,
    footer: dict[str, Any],
) -> Commit:
    """Run the target model over a shard's rows and publish the file.

    Rows keep their order; a row with a non-finite feature is rejected, and so are the task's
    faults. Memory holds one row group and one micro-batch, whatever the shard's size.
    """
    started = time.monotonic()
    staged = folder.stage(task.name)
    rejects: list[Reject] = []
    kept: list[str] = []
    tokens = supervised = 0

    def good_rows() -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rollout_rows(task, rollout_layout, folder)):
            if index in task.faults:
                rejects.append(_reject(row, *task.faults[index]))
            else:
                yield row

    with (
        ShardWriter(staged, layout, {**footer, "shard": task.name}) as writer,
        ThreadPoolExecutor(1) as background,  # encodes a row group while the next is computed
    ):
        written: Future[None] | None = None
        for group in row_groups(good_rows(), layout.stored_bytes_per_token):
            finished, bad = extract_rows(group, target, layout, settings)
            rejects += bad
            if written is not None:
                written.result()  # one at a time: order, and memory
            written = background.submit(writer.write, finished) if finished else None
            for row in finished:
                kept.append(row["sample_id"])
                tokens += row["num_tokens"]
                supervised += int(np.sum(row["loss_mask"]))
        if written is not None:
            written.result()
    commit = make_commit(
        staged,
        folder="data",
        stem=f"{task.name}-of-{task.total:05d}",
        name=task.name,
        kind="shard",
        rows=len(kept),
        tokens=tokens,
        supervised_tokens=supervised,
        ids_sha256=ids_sha256(kept),
        inputs_sha256=task.inputs_sha256,
        attempt=task.attempt,
        fingerprint=footer["fingerprint"],
        rejects=tuple(rejects),
        seconds=round(time.monotonic() - started, 3),
    )
    return folder.publish(staged, commit)


def extract_rows(
    rows: Sequence[dict[str, Any]], target: TargetModel, layout: Layout, settings: Settings
) -> tuple[list[Row], list[Reject]]:
    """Features of one row group, in its order, and the rows that have none."""
    done: dict[int, Row] = {}
    rejects: dict[int, Reject] = {}
    for batch in micro_batches([row["num_tokens"] for row in rows], settings.batch_tokens):
        positioned = [
            PositionedRow(rows[i]["input_ids"], _offset(rows[i], target.geometry, settings))
            for i in batch
        ]
        outputs = halving(
            lambda some: target.forward(
                some, top_k=settings.topk, block_layers=layout.block_layers
            ),
            positioned,
        )
        for i, row, output in zip(batch, positioned, outputs, strict=True):
            if isinstance(output, RowReject):
                rejects[i] = _reject(rows[i], output.reason, output.detail)
                continue
            arrays = feature_columns(output, row.ids, rows[i]["loss_mask"], layout)
            broken = [
                name
                for name, array in arrays.items()
                # The extremes of values with NaN are NaN.
                if array.dtype == np.float32 and not np.isfinite([array.min(), array.max()]).all()
            ]
            if broken:
                detail = f"{broken[0]} holds a value that is not finite"
                rejects[i] = _reject(rows[i], "non_finite", detail)
                continue
            scalars = {c.name: rows[i].get(c.name) for c in layout.columns if not c.shape}
            done[i] = {**scalars, **arrays, "position_offset": row.offset}
    return [done[i] for i in sorted(done)], [rejects[i] for i in sorted(rejects)]


def _reject(row: dict[str, Any], reason: str, detail: str) -> Reject:
    return Reject(source=row["source"], sample_id=row["sample_id"], reason=reason, detail=detail)


def _offset(row: dict[str, Any], geometry: Geometry, settings: Settings) -> int:
    return position_offset(
        geometry,
        seed=settings.seed,
        sample_id=row["sample_id"],
        num_tokens=row["num_tokens"],
        shift_max=settings.position_shift_max,
    )


def rollout_rows(task: ShardTask, layout: Layout, folder: RunFolder) -> Iterator[dict[str, Any]]:
    """The rollout rows of a shard, in order; checksums verified."""
    columns = [c for c in layout.columns if c.name != "text"]
    names = [c.name for c in columns]
    for name, start, stop in task.ranges:
        table = folder.read_table(name, names)
        arrays = [row_arrays(table[c.name], c)[start:stop] for c in columns]
        for values in zip(*arrays, strict=True):
            yield dict(zip(names, values, strict=True))


def row_groups(
    rows: Iterator[dict[str, Any]], bytes_per_token: int
) -> Iterator[list[dict[str, Any]]]:
    """Cut the rows where their features would pass ROW_GROUP_BYTES; at least one row each."""
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        row_bytes = row["num_tokens"] * bytes_per_token
        if group and size + row_bytes > ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(row)
        size += row_bytes
    if group:
        yield group
