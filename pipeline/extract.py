"""Stage 2, one shard: rollout rows in, one Parquet file of features and its record out."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from pipeline.batches import row_features, row_groups
from pipeline.errors import RowReject
from pipeline.geometry import Geometry
from pipeline.manifest import Commit, Reject, RunFolder, make_commit
from pipeline.models.base import TargetModel
from pipeline.schema import Layout
from pipeline.seeds import position_offset
from pipeline.settings import Settings
from pipeline.shards import Row, ShardWriter, ids_sha256, row_arrays
from pipeline.tasks import ShardTask


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
    offsets = [_offset(row, target.geometry, settings) for row in rows]
    found = row_features(
        rows, offsets, target, layout, top_k=settings.topk, batch_tokens=settings.batch_tokens
    )
    done = [features for features in found if not isinstance(features, RowReject)]
    rejects = [
        _reject(row, features.reason, features.detail)
        for row, features in zip(rows, found, strict=True)
        if isinstance(features, RowReject)
    ]
    return done, rejects


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
