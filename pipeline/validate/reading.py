"""From a row group's bytes to a `Group`, with whatever kept values from being read as trouble."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.schema import BoundColumn, storage_type
from pipeline.validate.group import Group, IntArray
from pipeline.validate.report import Problem
from pipeline.validate.shard import ShardFile, first_line


class Lists(NamedTuple):
    """An array column as stored. starts: int64 [R + 1]; values: [N, *inner shape]."""

    starts: IntArray
    values: npt.NDArray[Any]


def read_group(
    file: ShardFile, index: int, first_row: int, only: Collection[str] | None = None
) -> Group:
    """Read row group `index` of an open file whose layout is known; page checksums verified.

    only: the columns to read; all by default.
    """
    parquet = file.need_parquet()
    group = Group(file=file, first_row=first_row)
    columns = [c for c, there in file.columns() if there and (only is None or c.name in only)]
    group.whole = len(columns) == len(file.need_layout().columns)
    chunks = _read_columns(group, index, columns)
    lists: dict[str, Lists] = {}
    rows = parquet.metadata.row_group(index).num_rows
    group.row_ids = [f"#{first_row + i}" for i in range(rows)]
    for column in sorted(columns, key=lambda c: c.name != "sample_id"):
        if column.name not in chunks:
            continue
        decoded = _decode(group, column, chunks.pop(column.name), rows)
        if decoded is None:
            group.whole = False
        elif isinstance(decoded, Lists):
            lists[column.name] = decoded
        else:
            group.scalars[column.name] = decoded
            if column.name == "sample_id":
                group.row_ids = decoded
    _align(group, lists, rows)
    return group


def _read_columns(group: Group, index: int, columns: list[BoundColumn]) -> dict[str, Any]:
    """The columns of a row group; where that fails, one by one to name the broken ones."""
    parquet = group.file.need_parquet()
    names = [c.name for c in columns]
    try:
        table = parquet.read_row_group(index, columns=names)
        return {name: table[name] for name in names}
    except (OSError, pa.ArrowException):
        group.whole = False
    chunks = {}
    for name in names:
        try:
            chunks[name] = parquet.read_row_group(index, columns=[name])[name]
        except (OSError, pa.ArrowException) as error:
            group.file.broken.add(name)
            group.trouble.setdefault("parquet.pages", []).append(
                Problem(
                    file=group.file.name,
                    column=name,
                    found=f"row group {index}: {first_line(error)}",
                    expected="pages that decode and match their checksums",
                )
            )
    return chunks


def _decode(group: Group, column: BoundColumn, chunked: Any, rows: int) -> Any:
    """Lists, an integer array or a list of strings; None, and trouble, where it is malformed."""
    if len(chunked) != rows:
        return _malformed(group, column, f"{len(chunked)} rows", f"{rows} rows")
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    nulls, level = array.null_count, array
    for _ in column.shape:
        level = level.values
        nulls += level.null_count
    if nulls:
        return _malformed(group, column, f"{nulls} null values", "no nulls")
    if column.shape:
        return _decode_lists(group, column, array)
    if column.dtype != "string":
        return array.to_numpy(zero_copy_only=False)
    try:
        return array.to_pylist()
    except UnicodeDecodeError as error:
        return _malformed(group, column, f"text that is not UTF-8 ({error.reason})", "UTF-8 text")


def _malformed(group: Group, column: BoundColumn, found: str, expected: str) -> None:
    group.trouble.setdefault("rows.values", []).append(
        Problem(file=group.file.name, column=column.name, found=found, expected=expected)
    )


def _decode_lists(group: Group, column: BoundColumn, array: Any) -> Lists | None:
    assert array.type == storage_type(column)
    starts = array.offsets.to_numpy().astype(np.int64)
    starts, values, per_token = starts - starts[0], array.flatten(), 1
    for axis, size in enumerate(column.inner_shape):
        widths = np.diff(values.offsets.to_numpy())
        if (broken := np.flatnonzero(widths != size)).size:
            token, rest = divmod(int(broken[0]), per_token)
            row = int(np.searchsorted(starts, token, side="right")) - 1
            group.trouble.setdefault("rows.sizes", []).append(
                Problem(
                    file=group.file.name,
                    row=group.row_ids[row],
                    column=column.name,
                    index=(token - int(starts[row]), *([rest] if axis else [])),
                    found=f"{widths[broken[0]]} values",
                    expected=f"{size} ({column.axes[axis + 1]})",
                    places=len(broken),
                )
            )
            return None
        values, per_token = values.flatten(), per_token * size
    flat = values.to_numpy(zero_copy_only=False)
    return Lists(starts, flat.reshape(-1, *column.inner_shape))


def _align(group: Group, lists: dict[str, Lists], rows: int) -> None:
    """Set starts and arrays, without the rows whose columns do not have the same length."""
    told = group.scalars.get("num_tokens")
    if not lists or rows == 0:
        # Without a single array there are no rows to hold scalars against.
        group.scalars, group.row_ids = {}, []
        return
    names = list(lists)
    lengths = np.stack([np.diff(lists[name].starts) for name in names])  # [columns, R]
    agree = (lengths == lengths[0]).all(axis=0)
    expected = told if told is not None else np.median(lengths, axis=0).astype(np.int64)
    problems = group.trouble.setdefault("rows.num_tokens", [])
    for row in np.flatnonzero((lengths != expected).any(axis=0)).tolist():
        # Where all columns agree, it is num_tokens that is wrong.
        wrong = (
            [("num_tokens", f"{expected[row]}", f"{lengths[0, row]}, the length of every column")]
            if agree[row] and told is not None
            else [
                (name, f"{length} tokens", f"{expected[row]}")
                for name, length in zip(names, lengths[:, row].tolist(), strict=True)
                if length != expected[row]
            ]
        )
        problems += [
            Problem(file=group.file.name, row=group.row_ids[row], column=c, found=f, expected=e)
            for c, f, e in wrong
        ]
    if agree.all():
        group.starts = lists[names[0]].starts
        group.arrays = {name: lists[name].values for name in names}
        return
    group.whole = False
    for name in names:
        kept = np.repeat(agree, np.diff(lists[name].starts))
        group.arrays[name] = lists[name].values[kept]
    group.starts = np.concatenate([[0], np.cumsum(lengths[0, agree])])
    group.row_ids = [row for row, keep in zip(group.row_ids, agree, strict=True) if keep]
    group.scalars = {
        name: [v for v, keep in zip(column, agree, strict=True) if keep]
        if isinstance(column, list)
        else column[agree]
        for name, column in group.scalars.items()
    }
