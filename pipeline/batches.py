"""Rows in, features out: row groups, micro-batches, and what one forward pass gives each row.

Nothing of a run is known here (settings, folders, records), so that jobs/bench_gpu.py can measure
this very code where only torch, transformers and pyarrow are installed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.errors import RowReject
from pipeline.features import feature_columns
from pipeline.memory import halving
from pipeline.models.base import PositionedRow, TargetModel
from pipeline.schema import Layout
from pipeline.shards import ROW_GROUP_BYTES, Row


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


def row_features(
    rows: Sequence[dict[str, Any]],
    offsets: Sequence[int],
    target: TargetModel,
    layout: Layout,
    *,
    top_k: int,
    batch_tokens: int,
) -> list[Row | RowReject]:
    """The layout's columns of each rollout row at its position offset, in order.

    A row that memory does not hold, or with a feature that is not finite, gives a RowReject.
    """
    found: dict[int, Row | RowReject] = {}
    for batch in micro_batches([row["num_tokens"] for row in rows], batch_tokens):
        outputs = halving(
            lambda some: target.forward(some, top_k=top_k, block_layers=layout.block_layers),
            [PositionedRow(rows[i]["input_ids"], offsets[i]) for i in batch],
        )
        for i, output in zip(batch, outputs, strict=True):
            if isinstance(output, RowReject):
                found[i] = output
                continue
            row = rows[i]
            arrays = feature_columns(output, row["input_ids"], row["loss_mask"], layout)
            if (broken := _not_finite(arrays)) is not None:
                found[i] = RowReject("non_finite", f"{broken} holds a value that is not finite")
                continue
            scalars = {c.name: row.get(c.name) for c in layout.columns if not c.shape}
            found[i] = {**scalars, **arrays, "position_offset": offsets[i]}
    return [found[i] for i in range(len(rows))]


def _not_finite(arrays: dict[str, Any]) -> str | None:
    for name, array in arrays.items():
        # The extremes of values with NaN are NaN.
        if array.dtype == np.float32 and not np.isfinite([array.min(), array.max()]).all():
            return name
    return None
