"""Rows from Parquet files, by plain pyarrow, with nothing in the file able to run code."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import PipelineError, RowReject
from pipeline.prompt_rows import ColumnNames, SourceRow

MAX_ROW_GROUP_BYTES = 2 * 2**30  # uncompressed, of the prompts' columns
BATCH_ROWS = 64


def refuse_extension_types(path: Path) -> None:
    """Raise PipelineError if a Parquet file names an Arrow extension type.

    Opening such a file may run the deserialiser of whatever library has registered the type
    (Ray's unpickles), so the footer's bytes are searched before pyarrow sees them.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - 8, 0))
            tail = stream.read(8)
            length = int.from_bytes(tail[:4], "little")
            if size < 12 or tail[4:] != b"PAR1" or length > size - 12:
                raise PipelineError(f"{path.name} is a cut-off Parquet file; write it again")
            stream.seek(size - 8 - length)
            footer = stream.read(length)
    except OSError as error:
        raise PipelineError(f"{path.name} cannot be read: {error.strerror}") from None
    # The Arrow schema lies in the footer as base64; the byte before it may look like base64
    # too, so each of the four alignments is tried.
    for found in re.finditer(rb"[A-Za-z0-9+/]{40,}", footer):
        text = found.group()
        for shift in range(4):
            whole = text[shift : shift + (len(text) - shift) // 4 * 4]
            refuse_extension_name(base64.b64decode(whole), path)


def refuse_extension_name(schema: bytes, path: Path) -> None:
    """Raise PipelineError if the bytes of an Arrow schema name an extension type."""
    if b"ARROW:extension:name" in schema:
        raise PipelineError(
            f"{path.name} holds an Arrow extension type, whose reading may run code; "
            "write the prompts again as plain columns (strings, lists, structs)"
        )


def parquet_rows(path: Path, name: str, columns: ColumnNames) -> Iterator[SourceRow]:
    """Rows of a file, `name:row`. Raises PipelineError where it cannot be read."""
    number = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            columns.check(path.name, there)
            wanted = columns.wanted(there)
            _check_sizes(file.metadata, wanted, path)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for index in range(batch.num_rows):
                    number += 1
                    yield SourceRow(f"{name}:{number}", _arrow_row(batch, index))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path.name} cannot be read past row {number}: {error}") from None


def _check_sizes(metadata: pq.FileMetaData, columns: Sequence[str], path: Path) -> None:
    """Raise PipelineError where a few bytes would unpack to more than memory should hold."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunks = [group.column(i) for i in range(group.num_columns)]
        size = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema.partition(".")[0] in columns
        )
        if not 0 <= size <= MAX_ROW_GROUP_BYTES:
            raise PipelineError(
                f"{path.name}: row group {index} unpacks to {size:,} bytes of prompts, at most "
                f"{MAX_ROW_GROUP_BYTES:,} are read; write smaller row groups"
            )


def _arrow_row(batch: pa.RecordBatch, index: int) -> dict[str, Any] | RowReject:
    try:
        row: dict[str, Any] = without_nulls(batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError:
        return RowReject("bad_encoding", "a text of this row is not UTF-8")
    return row


def without_nulls(value: Any) -> Any:
    """The value without null fields: Arrow gives every struct the fields of all of them, so a
    tool would come with the parameters of the others."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
