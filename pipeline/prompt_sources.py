"""Where rows come from: JSON Lines, Parquet and Hugging Face datasets, in bounded memory.

Every reader yields `SourceRow`: the row's place and either its values or why it cannot be read.
A fault of one row is a `RowReject`; a fault of the whole source is a `PipelineError`.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import PipelineError, RowReject

MAX_LINE_BYTES = 64 * 2**20
MAX_DEPTH = 100
MAX_ROW_GROUP_BYTES = 2 * 2**30  # uncompressed, of the prompts' columns
BATCH_ROWS = 64

TURNS = ("messages", "conversations")  # where a row's turns are
PAIRS = ("instruction", "prompt")  # or its question
INPUT_KEY = "input"  # what an instruction works on
ANSWER_KEYS = {"instruction": ("output",), "prompt": ("completion", "response")}

# The only columns read from Parquet and datasets; others may hold images or gigabytes.
COLUMNS = (
    *("id", "sample_id", "system", "tools", "functions", INPUT_KEY),
    *TURNS,
    *PAIRS,
    *(key for keys in ANSWER_KEYS.values() for key in keys),
)

JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\x1f\x8b": "gzip-compressed; decompress it first",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; decompress it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xff\xfe": "UTF-16; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16; convert it to UTF-8 first",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull` first",
}
# A whole string, closed or not, or one bracket. Possessive, so hostile quotes cost linear time.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class SourceRow(NamedTuple):
    """source: `file.jsonl:12` (1-based); row: the values, or why there are none."""

    source: str
    row: dict[str, Any] | RowReject


class NumberText(str):
    """A JSON number as it is written: a 23-digit id stays exact, and is no text content."""

    __slots__ = ()


def open_rows(path: str) -> Iterator[SourceRow]:
    """Rows of a JSON Lines or Parquet file, a saved dataset folder, or a dataset name.

    Raises PipelineError at once when the source does not exist or is of no readable kind, and
    while iterating when it breaks half-way.
    """
    if "://" in path:
        raise PipelineError(
            "Prompts are read from a local path or a dataset name, not from a URL; "
            "download the file and pass its path"
        )
    try:
        place = Path(path).expanduser()
        is_dir, is_file, exists = place.is_dir(), place.is_file(), place.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"Prompt path {path!r} cannot be used: {error}") from None
    if not path.strip():
        raise PipelineError("The prompt path is empty; pass a file, a folder or a dataset name")
    if is_file:
        return _open_file(place)
    if is_dir or not exists:
        from pipeline.prompt_datasets import open_dataset

        return open_dataset(path)
    raise PipelineError(f"Prompt path {path!r} is neither a regular file nor a folder")


def _open_file(path: Path) -> Iterator[SourceRow]:
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise PipelineError(f"{path.name} cannot be read: {error.strerror}") from None
    if not head:
        raise PipelineError(f"{path.name} is empty; prompts need at least one row")
    if head.startswith(b"PAR1"):
        refuse_extension_types(path)
        return _parquet_rows(path)
    if path.suffix == ".parquet":
        raise PipelineError(f"{path.name} does not start like a Parquet file; write it again")
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise PipelineError(f"{path.name} is {what}")
    if path.suffix == ".json" and head.removeprefix(_BOM).lstrip().startswith(b"["):
        raise PipelineError(
            f"{path.name} is one JSON array; write one object a line instead "
            f"(jq -c '.[]' {path.name} > prompts.jsonl)"
        )
    return _jsonl_rows(path)


# ---- JSON Lines


def _jsonl_rows(path: Path) -> Iterator[SourceRow]:
    """Split on line feeds only: U+2028 and U+0085 are legal inside JSON text."""
    offset = 0
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                start, offset = offset, offset + len(line)
                source = f"{printable_name(path)}:{number}"
                if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    offset += _skip_line(stream)
                    detail = f"longer than {MAX_LINE_BYTES} bytes, at byte offset {start}"
                    yield SourceRow(source, RowReject("line_too_long", detail))
                    continue
                if start == 0:
                    line = line.removeprefix(_BOM)
                    start += offset - len(line)
                if line.strip():
                    yield SourceRow(source, _parse_or_reject(line, start))
    except OSError as error:
        raise PipelineError(
            f"{path.name} stopped being readable at byte {offset}: {error.strerror}"
        ) from None


def _skip_line(stream: BinaryIO) -> int:
    """Read on to the end of the line; the bytes passed over."""
    skipped = 0
    while piece := stream.readline(2**20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _parse_or_reject(line: bytes, start: int) -> dict[str, Any] | RowReject:
    try:
        return parse_object(line, start)
    except RowReject as reject:
        return reject


def parse_object(line: bytes, start: int = 0) -> dict[str, Any]:
    """One line of JSON Lines as a dict; numbers become `NumberText`.

    start: byte offset of the line in its file, for messages.
    Raises RowReject: bad_encoding, too_deep, bad_json, duplicate_key, non_finite_number,
    not_an_object.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"not UTF-8 at byte offset {start + error.start}"
        raise RowReject("bad_encoding", detail) from None
    if _is_deep(line):
        detail = f"nested deeper than {MAX_DEPTH} levels, at byte offset {start}"
        raise RowReject("too_deep", detail)
    where = f"in the line at byte offset {start}"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise RowReject("duplicate_key", f"key {quote(twice)} comes twice {where}")
        return made

    def refuse_constant(name: str) -> NoReturn:
        raise RowReject("non_finite_number", f"{name} is not JSON, {where}")

    try:
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=NumberText,
            parse_float=NumberText,
            parse_constant=refuse_constant,
        )
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode())
        raise RowReject("bad_json", f"{error.msg} at byte offset {at}") from None
    if not isinstance(value, dict):
        raise RowReject("not_an_object", f"a row must be a JSON object, {where}")
    return value


def _is_deep(line: bytes) -> bool:
    """Whether brackets nest past MAX_DEPTH.

    Python's own limit depends on how deep the caller stands, and a row must be taken or
    rejected alike everywhere.
    """
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKETS.finditer(line):
        byte = line[match.start()]
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif byte in b"]}":
            depth -= 1
    return False


# ---- Parquet


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


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    number = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            columns = [name for name in COLUMNS if name in names]
            check_columns(f"{path.name}", names)
            _check_sizes(file.metadata, columns, path)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    yield SourceRow(f"{printable_name(path)}:{number}", _arrow_row(batch, index))
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


def check_columns(what: str, names: Sequence[str]) -> None:
    """Raise PipelineError if none of the columns can hold a conversation."""
    if not {*TURNS, *PAIRS} & set(names):
        wanted = ", ".join((*TURNS, *PAIRS))
        there = ", ".join(map(quote, names))
        raise PipelineError(f"{what} has none of the columns {wanted}, only: {there}")


def _arrow_row(batch: pa.RecordBatch, index: int) -> dict[str, Any] | RowReject:
    try:
        row: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return RowReject("bad_encoding", "a text of this row is not UTF-8")
    return row


# ---- words for messages


def printable_name(path: Path) -> str:
    """The last part of a path as valid text: names on disk need not be UTF-8."""
    return path.name.encode("utf-8", "backslashreplace").decode("utf-8")


def quote(value: object, limit: int = 60) -> str:
    """A value in quotes for a message: short, on one line, without lone surrogates."""
    text = repr(str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"
