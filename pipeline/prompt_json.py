"""Rows from JSON Lines and from JSON arrays, one after the other in bounded memory."""

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from pipeline.errors import RowReject
from pipeline.prompt_rows import NumberText, SourceRow, quote

MAX_LINE_BYTES = 64 * 2**20  # of one row
MAX_DEPTH = 100
_CHUNK = 2**18
_BOM = b"\xef\xbb\xbf"
# A whole string, closed or not, or one bracket. Possessive, so hostile quotes cost linear time.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb"(?:[^\"\\]++|\\.)*+", re.DOTALL)


def jsonl_rows(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Rows of JSON Lines, `name:line`. Lines end at line feeds only: U+2028 and U+0085 are legal
    inside JSON text."""
    offset = number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        start, offset = offset, offset + len(line)
        source = f"{name}:{number}"
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            offset += _skip_line(stream)
            yield SourceRow(source, _too_long(start))
            continue
        if start == 0:
            line = line.removeprefix(_BOM)
            start += offset - len(line)
        if line.strip():
            yield SourceRow(source, _parse_or_reject(line, start))


def _skip_line(stream: BinaryIO) -> int:
    """Read on to the end of the line; the bytes passed over."""
    skipped = 0
    while piece := stream.readline(2**20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _too_long(start: int) -> RowReject:
    detail = f"longer than {MAX_LINE_BYTES} bytes, at byte offset {start}"
    return RowReject("line_too_long", detail)


def array_rows(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Rows of one JSON array, `name:element`; the stream starts with it, perhaps after a BOM."""
    for number, (element, start) in enumerate(_elements(stream), 1):
        source = f"{name}:{number}"
        if isinstance(element, RowReject):
            yield SourceRow(source, element)
        else:
            yield SourceRow(source, _parse_or_reject(element, start))


def _elements(stream: BinaryIO) -> Iterator[tuple[bytes | RowReject, int]]:
    """The texts between an array's commas, each with its byte offset.

    What is no element, or stands after the end, comes as a reject: nothing is passed over.
    """
    before, chunk = 0, stream.read(_CHUNK)
    while chunk and b"[" not in chunk:
        before, chunk = before + len(chunk), stream.read(_CHUNK)
    inside = chunk.find(b"[") + 1
    cut = _ArrayCutter(before + inside)
    chunk = chunk[inside:]
    while chunk:
        yield from cut.feed(chunk)
        chunk = stream.read(_CHUNK)
    yield from cut.finish()


class _ArrayCutter:
    """Cuts an array's inside, fed piece by piece, at the commas that are its own."""

    def __init__(self, start: int) -> None:
        self._pieces: list[bytes] = []  # of the current element
        self._size = 0  # of it, kept or not
        self._offset = start  # of its first byte
        self._depth = 1
        self._in_string = False
        self._escaped = False  # the last piece ended on a backslash in a string
        self._found = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes | RowReject, int]]:
        position = begin = 0
        while position < len(chunk):
            if self._depth == 0:
                break
            if self._in_string:
                position = self._through_string(chunk, position)
                continue
            found = _STRUCTURE.search(chunk, position)
            if found is None:
                break
            position = found.end()
            byte = found.group()
            if byte == b'"':
                self._in_string = True
            elif byte in b"[{":
                self._depth += 1
            elif byte in b"]}":
                self._depth -= 1
            if self._depth == 0 or (byte == b"," and self._depth == 1):
                self._keep(chunk[begin : position - 1])
                yield from self._cut(last=self._depth == 0)
                begin = position
        self._keep(chunk[begin:])

    def _through_string(self, chunk: bytes, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        found = _IN_STRING.match(chunk, position)
        assert found is not None  # it may be empty
        end = found.end()
        if end < len(chunk):
            if chunk[end : end + 1] == b'"':
                self._in_string = False
            else:  # a backslash that ends the chunk
                self._escaped = True
            end += 1
        return end

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= MAX_LINE_BYTES:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def _cut(self, *, last: bool) -> Iterator[tuple[bytes | RowReject, int]]:
        """The element that ends here; `last`: at the closing bracket, before which may be none."""
        text, start = b"".join(self._pieces), self._offset
        if self._size > MAX_LINE_BYTES:
            yield _too_long(start), start
        elif text.strip():
            yield text, start
        elif not last or self._found:
            yield (
                RowReject("bad_json", f"nothing before the comma or bracket after byte {start}"),
                0,
            )
        self._found += 1
        self._offset += self._size + 1
        self._pieces, self._size = [], 0

    def finish(self) -> Iterator[tuple[bytes | RowReject, int]]:
        text, where = b"".join(self._pieces).strip(), f"byte offset {self._offset}"
        if self._depth > 0:
            yield (
                RowReject("bad_json", f"the array does not end; its last row starts at {where}"),
                0,
            )
        elif text or self._size > MAX_LINE_BYTES:
            yield RowReject("bad_json", f"there is more after the array's end, at {where}"), 0


def _parse_or_reject(line: bytes, start: int) -> dict[str, Any] | RowReject:
    try:
        return parse_object(line, start)
    except RowReject as reject:
        return reject


def parse_object(line: bytes, start: int = 0) -> dict[str, Any]:
    """One row's JSON as a dict; numbers become `NumberText`.

    start: byte offset of the row in its file, for messages.
    Raises RowReject: bad_encoding, too_deep, bad_json, duplicate_key, non_finite_number,
    not_an_object.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"not UTF-8 at byte offset {start + error.start}"
        raise RowReject("bad_encoding", detail) from None
    where = f"in the row at byte offset {start}"
    try:
        value = parse_json(text, where)
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode())
        raise RowReject("bad_json", f"{error.msg} at byte offset {at}") from None
    if not isinstance(value, dict):
        raise RowReject("not_an_object", f"a row must be a JSON object, {where}")
    return value


def parse_json(text: str, where: str) -> Any:
    """One JSON value, with numbers as `NumberText`; where: for messages.

    Raises json.JSONDecodeError, and RowReject: too_deep, duplicate_key, non_finite_number.
    """
    if _is_deep(text.encode("utf-8", "surrogatepass")):
        raise RowReject("too_deep", f"nested deeper than {MAX_DEPTH} levels, {where}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise RowReject("duplicate_key", f"key {quote(twice)} comes twice {where}")
        return made

    def refuse_constant(name: str) -> NoReturn:
        raise RowReject("non_finite_number", f"{name} is not JSON, {where}")

    return json.loads(
        text,
        object_pairs_hook=unique,
        parse_int=NumberText,
        parse_float=NumberText,
        parse_constant=refuse_constant,
    )


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
