"""The header of one GGUF file: metadata and tensor table, every size bounded before it is used.

Nothing here trusts a number in the file: counts and lengths are compared with the bytes that are
left and with fixed caps before anything of that size is allocated, so a hostile or cut file is
refused in milliseconds.
"""

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pipeline.errors import PipelineError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28  # the largest vocabulary in use (262k tokens, 515k merges) takes 16 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 22  # of all arrays together; that vocabulary has 1.3 million
MAX_KEY_BYTES = (1 << 16) - 1  # the GGUF specification's own limit
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_BOOL = 7
# GGUF value type -> little-endian numpy dtype
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a GGUF file.

    shape: in torch's order (rows first); GGUF itself stores it reversed.
    offset: bytes from the start of `file`; nbytes: size on disk in its quantised form.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    file: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements once dequantised."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Header:
    """Metadata and tensor table of one file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads little-endian values from `data`, never past its end or past the header cap."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.elements = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, what: str) -> PipelineError:
        return PipelineError(f"{self.path}: {what}")

    def need(self, count: int, size: int, what: str) -> None:
        """Raise unless `count` items of at least `size` bytes each can follow."""
        if count * size <= self.end - self.at:
            return
        if self.end < len(self.data):
            raise self.fail(
                f"{what} would need {count * size} bytes, past the {MAX_HEADER_BYTES} bytes a "
                "header may take; this is not a sane GGUF file"
            )
        raise self.fail(
            f"the file is cut short in {what}: expected at least {self.at + count * size} bytes, "
            f"found {len(self.data)}; download or convert the file again"
        )

    def u32(self, what: str) -> int:
        self.need(1, 4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(1, 8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def strings(self, count: int, what: str, limit: int = MAX_HEADER_BYTES) -> list[str]:
        """Read `count` strings in one tight loop: vocabularies hold hundreds of thousands."""
        self.need(count, 8, what)
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        raw: list[bytes] = []
        for _ in range(count):
            if at + 8 > end:
                self.at = at
                self.need(1, 8, what)
            stop = at + 8 + unpack(data, at)[0]
            if stop > end or stop - at - 8 > limit:
                self.at = at
                if stop - at - 8 > limit:
                    raise self.fail(
                        f"{what} is {stop - at - 8} bytes long, at most {limit} are allowed; "
                        "this is not a sane GGUF file"
                    )
                self.need(stop - at, 1, what)
            raw.append(data[at + 8 : stop])
            at = stop
        self.at = at
        try:
            return [piece.decode() for piece in raw]
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} holds text that is not UTF-8 ({error.reason})") from None

    def value(self, kind: int, what: str) -> Any:
        """One metadata value: int, float, bool, str, or a list of one of them."""
        if kind == _STRING:
            return self.strings(1, what)[0]
        if kind == _ARRAY:
            kind, count = self.u32(what), self.u64(what)
            self.elements += count
            if self.elements > MAX_ELEMENTS:
                raise self.fail(
                    f"with {what} the arrays claim {self.elements} elements, at most "
                    f"{MAX_ELEMENTS} are allowed; this is not a sane GGUF file"
                )
            return self.strings(count, what) if kind == _STRING else self.numbers(kind, count, what)
        return self.numbers(kind, 1, what)[0]

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.fail(f"{what} has the unknown or nested value type {kind}")
        self.need(count, dtype.itemsize, what)
        stop = self.at + count * dtype.itemsize
        values = np.frombuffer(self.data[self.at : stop], dtype=dtype)
        self.at = stop
        return list((values != 0).tolist() if kind == _BOOL else values.tolist())


def read_header(path: Path) -> Header:
    """Read the header of one GGUF file; tensor data is not touched.

    Raises PipelineError naming the file and the key or tensor for anything that is not a
    well-formed little-endian GGUF file of version 2 or 3 with all its tensor data present.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise PipelineError(f"{path}: the file is empty; download or convert it again")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return _parse(_Cursor(path, m))
    except OSError as error:
        raise PipelineError(f"{path}: cannot read the GGUF file: {error.strerror}") from None


def _parse(cursor: _Cursor) -> Header:
    _check_magic(cursor)
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    for count, cap, size, what in (
        (tensor_count, MAX_TENSORS, 32, "tensors"),
        (key_count, MAX_KEYS, 13, "metadata keys"),
    ):
        if count > cap:
            raise cursor.fail(
                f"the header claims {count} {what}, at most {cap} are allowed; "
                "this is not a sane GGUF file"
            )
        cursor.need(count, size, f"the table of {count} {what}")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        (key,) = cursor.strings(1, f"the name of key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"the key {key} appears twice")
        metadata[key] = cursor.value(cursor.u32(f"key {key}"), f"key {key}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.fail(
            f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} is expected"
        )
    entries = [_tensor_entry(cursor, index, alignment) for index in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata=metadata, tensors=_place(cursor, entries, start))


def _check_magic(cursor: _Cursor) -> None:
    head = bytes(cursor.data[:64])
    if head.startswith(b"version https://git-lfs"):
        raise cursor.fail(
            "this is a Git LFS pointer, not the model; fetch the real file (git lfs pull)"
        )
    if head[:4] != MAGIC:
        if MAGIC.startswith(head):
            cursor.need(4, 1, "the magic number")
        raise cursor.fail(f"not a GGUF file: it starts with {head[:4]!r} and not with b'GGUF'")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        why = "it is big-endian" if version & 0xFFFF == 0 and version else "it is not supported"
        raise cursor.fail(f"GGUF version {version:#x}: {why}; convert the model again (version 3)")


def _tensor_entry(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """Read one row of the tensor table; its offset is still relative to the data section."""
    (name,) = cursor.strings(1, f"the name of tensor {index}", MAX_KEY_BYTES)
    what = f"tensor {name}"
    dims = cursor.u32(what)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {dims} dimensions; 1 to {MAX_DIMS} are possible")
    shape = tuple(reversed([cursor.u64(what) for _ in range(dims)]))
    kind, offset = cursor.u32(what), cursor.u64(what)
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise cursor.fail(
            f"{what} has the unknown ggml type {kind}; a newer gguf package may know it"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    elements = 1
    for length in shape:
        elements *= length
    if not 0 < elements < 1 << 48 or shape[-1] % block:
        raise cursor.fail(
            f"{what} has the impossible shape {list(shape)} for {ggml_type.name} blocks of {block}"
        )
    if offset % alignment:
        raise cursor.fail(f"{what} starts at {offset}, not a multiple of the alignment {alignment}")
    nbytes = elements // block * block_bytes
    return TensorInfo(
        name=name,
        shape=shape,
        ggml_type=ggml_type,
        file=cursor.path,
        offset=offset,
        nbytes=nbytes,
    )


def _place(cursor: _Cursor, entries: Iterable[TensorInfo], start: int) -> dict[str, TensorInfo]:
    """Make offsets absolute; check names, overlaps and that all data is in the file."""
    tensors: dict[str, TensorInfo] = {}
    end = start
    size = len(cursor.data)
    for entry in sorted(entries, key=lambda t: t.offset):
        if entry.name in tensors:
            raise cursor.fail(f"the tensor {entry.name} appears twice")
        placed = TensorInfo(**{**vars(entry), "offset": start + entry.offset})
        if placed.offset < end:
            raise cursor.fail(f"the data of tensor {entry.name} overlaps the tensor before it")
        end = placed.offset + placed.nbytes
        if end > size:
            raise cursor.fail(
                f"the file is cut short in tensor {entry.name}: expected at least {end} bytes, "
                f"found {size}; download or convert the file again"
            )
        tensors[entry.name] = placed
    return tensors
