"""Parquet files: rows of arrays in, one finished file out, the same bytes for the same rows.

The physical form is DESIGN §4: float32 leaves with BYTE_STREAM_SPLIT, everything zstd level 1,
dictionaries and statistics only where they help a reader, page checksums on.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import PipelineError, StorageError
from pipeline.schema import BoundColumn, Layout, storage_type

# Uncompressed bytes of a row group, as stored; DESIGN §4 allows 256 MiB.
ROW_GROUP_BYTES = 128 * 2**20

# column name -> str or int for a scalar column, array [T, …] for the others
Row = Mapping[str, Any]


def list_array(column: BoundColumn, arrays: Sequence[npt.NDArray[Any]]) -> pa.Array:
    """One nested-list array from each row's [T, …] array, without copying value by value.

    Raises PipelineError if an array's shape or dtype is not the column's.
    """
    stored = np.dtype(column.stored_as)
    for array in arrays:
        if array.dtype != stored or array.shape[1:] != column.inner_shape:
            raise PipelineError(
                f"column {column.name}: got {array.dtype} {list(array.shape)}, "
                f"expected {stored} {['T', *column.inner_shape]}"
            )
    values: pa.Array = pa.array(np.concatenate(arrays).reshape(-1))
    lists = len(values)
    for size in reversed(column.inner_shape):
        lists //= size
        inner = np.arange(lists + 1, dtype=np.int64) * size
        values = pa.ListArray.from_arrays(list_offsets(inner), values)
    bounds = np.cumsum([0, *(len(array) for array in arrays)])
    return pa.ListArray.from_arrays(list_offsets(bounds), values)


def list_offsets(bounds: npt.NDArray[np.int64]) -> pa.Array:
    """Offsets of a list array; a row group is far smaller than their 32 bits hold.

    Raises pa.ArrowInvalid for what does not fit: numpy's own cast would wrap without a word.
    """
    return pa.array(bounds, pa.int32())


def to_table(rows: Sequence[Row], layout: Layout, schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table in the layout's column order."""
    arrays = []
    for column, field in zip(layout.columns, schema, strict=True):
        cells: list[Any] = [row[column.name] for row in rows]
        if not column.shape:
            array = pa.array(cells, type=field.type)
        else:
            array = list_array(column, cells)
            if isinstance(field.type, pa.BaseExtensionType):
                array = pa.ExtensionArray.from_storage(field.type, array)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


class ShardWriter:
    """Writes one Parquet file; leaving its `with` block by an exception leaves no file.

    pyarrow's own writer would put a footer on a short file there, which then reads as whole.
    """

    def __init__(self, path: Path, layout: Layout, footer: Mapping[str, Any]) -> None:
        self.path = path
        self.layout = layout
        self.schema = layout.arrow_schema(footer)
        scalars = [c.name for c in layout.columns if not c.shape]
        strings = [c.name for c in layout.columns if c.dtype == "string" and c.name != "text"]
        self._writer = pq.ParquetWriter(
            path,
            self.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=strings,
            use_byte_stream_split=layout.leaf_paths(floats=True),
            write_statistics=scalars,
            write_page_checksum=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows as one row group."""
        table = to_table(rows, self.layout, self.schema)
        self._writer.write_table(table, row_group_size=len(rows))


def check_readable(path: Path) -> None:
    """Read a finished file once, row group by row group, checksums verified.

    pyarrow writes some files that it then cannot read (a nested column over 2 GiB in a row group,
    measured with pyarrow 26), and disks lie. Raises StorageError.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group).num_rows
                if rows != file.metadata.row_group(group).num_rows:
                    raise StorageError(f"{path}: row group {group} reads as {rows} rows")
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path}: written, but cannot be read: {error}") from error


def read_rows(path: Path, columns: Sequence[BoundColumn]) -> list[dict[str, Any]]:
    """Read a file this package wrote, checksums verified: row -> column -> value or array."""
    table = pq.read_table(path, columns=[c.name for c in columns], page_checksum_verification=True)
    arrays = [row_arrays(table[c.name], c) for c in columns]
    return [
        {c.name: values[i] for c, values in zip(columns, arrays, strict=True)}
        for i in range(table.num_rows)
    ]


def row_arrays(array: pa.Array, column: BoundColumn) -> list[Any]:
    """The values of a column, row by row: Python scalars, or arrays [T, …] (views).

    Raises PipelineError where the stored lists do not have the column's fixed sizes.
    """
    if isinstance(array, pa.ChunkedArray):  # combine_chunks would copy a single chunk too
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not column.shape:
        scalars: list[Any] = array.to_pylist()
        return scalars
    if array.type != storage_type(column):
        raise PipelineError(f"column {column.name}: stored as {array.type}")
    bounds = array.offsets.to_numpy()
    values = array.values
    for size in column.inner_shape:
        inner = values.offsets.to_numpy()
        if inner[0] != 0 or not (np.diff(inner) == size).all():
            raise PipelineError(f"column {column.name}: an inner list is not {size} long")
        values = values.values
    flat = values.to_numpy(zero_copy_only=False).reshape(-1, *column.inner_shape)
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ids_sha256(sample_ids: Sequence[str]) -> str:
    """A digest of a list of ids in order; lengths are part of it, so no two lists collide."""
    total = hashlib.sha256()
    for sample_id in sample_ids:
        raw = sample_id.encode()
        total.update(len(raw).to_bytes(8, "big") + raw)
    return total.hexdigest()
