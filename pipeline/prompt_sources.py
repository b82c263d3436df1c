"""Where prompts come from: files, folders of files, standard input, Hugging Face datasets.

What a file is shows in its first bytes, not in its name. Every reader yields `SourceRow`s in
bounded memory. A fault of one row is a `RowReject`; a fault of the whole source a `PipelineError`.
"""

import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from pipeline.errors import PipelineError
from pipeline.prompt_json import array_rows, jsonl_rows
from pipeline.prompt_parquet import parquet_rows, refuse_extension_types
from pipeline.prompt_rows import ColumnNames, SourceRow, printable_name

STDIN = "-"
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PROMPT_SUFFIXES = frozenset({*LINES_SUFFIXES, ".json", ".parquet"})
COMPRESSED_SUFFIXES = frozenset({".gz", ".zst"})
_METADATA = frozenset({"dataset_info.json", "dataset_infos.json"})  # of datasets' own folders
# Text compresses to a tenth; what unpacks to this many times its size is made to fill memory
# or time.
MAX_RATIO = 1000
_UNPACKED_FREE = 64 * 2**20  # bytes that any file may unpack to
_HEAD = 64
_BOM = b"\xef\xbb\xbf"
_COMPRESSION = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_FOREIGN = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2-compressed; decompress it first",
    b"\xfd7zXZ": "xz-compressed; decompress it first",
    b"\xff\xfe": "UTF-16; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16; convert it to UTF-8 first",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull` first",
}

Open = Callable[[], BinaryIO]


def open_rows(path: str, columns: ColumnNames | None = None) -> Iterator[SourceRow]:
    """Rows of a file, a folder, standard input (`-`), a saved dataset or a dataset name.

    Raises PipelineError at once when the source does not exist or is of no readable kind, and
    while iterating when it breaks half-way.
    """
    columns = columns or ColumnNames()
    if "://" in path:
        raise PipelineError(
            "Prompts are read from a local path or a dataset name, not from a URL; "
            "download the file and pass its path"
        )
    if path == STDIN:
        return _open_file(_spooled_stdin(), "stdin", columns)
    try:
        place = Path(path).expanduser()
        is_dir, is_file, exists = place.is_dir(), place.is_file(), place.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"Prompt path {path!r} cannot be used: {error}") from None
    if not path.strip():
        raise PipelineError("The prompt path is empty; pass a file, a folder or a dataset name")
    if is_file:
        return _open_file(place, printable_name(Path(place.name)), columns)
    if is_dir and (files := _prompt_files(place)):
        return _folder_rows(place, files, columns)
    if is_dir or not exists:
        from pipeline.prompt_datasets import open_dataset

        return open_dataset(path, columns)
    raise PipelineError(f"Prompt path {path!r} is neither a regular file nor a folder")


@functools.cache
def _spooled_stdin() -> Path:
    """Standard input in a temporary file that goes with this process.

    A run reads its prompts more than once, and standard input comes once.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise PipelineError("--prompts -: nothing is piped into standard input")
    with tempfile.TemporaryFile(prefix="prompts-") as spool:  # has no name to be left behind
        while piece := sys.stdin.buffer.read(2**20):
            spool.write(piece)
        spool.flush()
        return Path(f"/dev/fd/{os.dup(spool.fileno())}")


def _prompt_files(folder: Path) -> list[Path]:
    """The files of a folder that can hold prompts, in the order of their relative paths.

    None of a folder that `save_to_disk` made. Empty files are left out, and so are hidden files
    and folders and those that start with an underscore.
    """
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return []
    found = [
        file
        for file in folder.rglob("*")
        if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        and _inner_suffix(file) in PROMPT_SUFFIXES
        and file.name not in _METADATA
        and file.is_file()
        and file.stat().st_size
    ]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def _inner_suffix(path: Path) -> str:
    """`.jsonl` of `a.jsonl.gz`."""
    name = Path(path.stem) if path.suffix in COMPRESSED_SUFFIXES else path
    return name.suffix


def _folder_rows(folder: Path, files: list[Path], columns: ColumnNames) -> Iterator[SourceRow]:
    for file in files:
        yield from _open_file(file, printable_name(file.relative_to(folder)), columns)


def _open_file(path: Path, name: str, columns: ColumnNames) -> Iterator[SourceRow]:
    """Rows of a file, each from `name:row`. Raises PipelineError at once if it is none."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise PipelineError(f"{name} cannot be read: {error.strerror}") from None
    if not head:
        raise PipelineError(f"{name} is empty; prompts need at least one row")
    if head.startswith(b"PAR1"):
        refuse_extension_types(path)
        return parquet_rows(path, name, columns)
    if path.suffix == ".parquet":
        raise PipelineError(f"{name} does not start like a Parquet file; write it again")
    compression = next((kind for magic, kind in _COMPRESSION.items() if head.startswith(magic)), "")

    def opener() -> BinaryIO:
        return _decompressed(path, compression) if compression else path.open("rb")

    if compression:
        head = _first_bytes(opener, name, compression)
    for magic, what in {**_FOREIGN, b"PAR1": "compressed Parquet; decompress it first"}.items():
        if head.startswith(magic):
            raise PipelineError(f"{name} is {what}")
    return _json_rows(opener, name, _inner_suffix(path), compression)


def _json_rows(opener: Open, name: str, suffix: str, compression: str) -> Iterator[SourceRow]:
    done = ""
    try:
        with opener() as stream:
            lines = suffix in LINES_SUFFIXES or not _starts_array(stream)
        with opener() as stream:
            for row in (jsonl_rows if lines else array_rows)(stream, name):
                done = row.source
                yield row
    except OSError as error:  # and what pyarrow raises on broken streams
        what = f"the {compression} stream" if compression else "it"
        after = f"after {done}" if done else "from its start"
        raise PipelineError(f"{name}: {what} cannot be read {after}: {error}") from None


def _starts_array(stream: BinaryIO) -> bool:
    """Whether the first byte that is no space opens an array."""
    head = stream.read(_HEAD).removeprefix(_BOM)
    while not head.strip():
        head = stream.read(_HEAD)
        if not head:
            return False
    return head.lstrip().startswith(b"[")


# ---- compressed files


def _first_bytes(opener: Open, name: str, compression: str) -> bytes:
    try:
        with opener() as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise PipelineError(f"{name} is broken {compression}: {error}; write it again") from None
    if not head:
        raise PipelineError(f"{name} is empty once decompressed; prompts need at least one row")
    return head


def _decompressed(path: Path, compression: str) -> BinaryIO:
    """The unpacked bytes; pyarrow takes frame after frame and raises where the last is cut."""
    raw = pa.CompressedInputStream(pa.OSFile(str(path)), compression)
    size = path.stat().st_size
    return cast(BinaryIO, io.BufferedReader(_Unpacked(raw, size), 2**20))


class _Unpacked(io.RawIOBase):
    """A decompressing stream that ends with OSError where it unpacks to absurd sizes."""

    def __init__(self, raw: Any, size: int) -> None:
        self._raw = raw
        self._most = max(_UNPACKED_FREE, size * MAX_RATIO)
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        self._read += len(data)
        if self._read > self._most:
            raise OSError(f"it unpacks to more than {MAX_RATIO} times its size")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()
