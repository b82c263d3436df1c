"""Prompts: any chat source becomes `PromptRow`s of one shape, each bad row a `RejectedRow`.

How a row's turns are found: prompt_turns.py. `id` or `sample_id` names the row, a `system` text is
its first turn, the role developer is system; other keys are ignored everywhere.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from pipeline.errors import PipelineError, RowReject
from pipeline.prompt_order import PromptSource, mixed, parse_sources, shuffled
from pipeline.prompt_rendered import Rendered
from pipeline.prompt_rows import ColumnNames, SourceRow, quote
from pipeline.prompt_sources import open_rows
from pipeline.prompt_tools import check_unicode
from pipeline.prompt_turns import Chat, Message, Thinking, Turns, read_chat

SEEN_CACHE_KIB = 64 * 2**10  # of ids held in memory
MAX_ID_CHARS = 1024


class PromptRow(NamedTuple):
    """One accepted row; source: `file.jsonl:12` or `dataset:12`, 1-based, `TAG:` before it.

    messages: its turns; of a rendered prompt there are none. tools: what may be called.
    """

    sample_id: str
    source: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    rendered: Rendered | None = None
    tag: str = ""

    @property
    def chat(self) -> Chat:
        return Chat(self.messages, self.tools, self.rendered)


class RejectedRow(NamedTuple):
    """One rejected row.

    reason: a key of prompt_reasons.REJECT_REASONS; sample_id: None without a usable id.
    """

    source: str
    sample_id: str | None
    reason: str
    detail: str
    tag: str = ""


class _Row(NamedTuple):
    """A row before it is compared with others; chat: None of a rejected one."""

    tag: str
    source: str
    sample_id: str | None
    chat: Chat | None
    reason: str
    detail: str


def read_prompts(
    paths: str | Sequence[str],
    *,
    limit: int | None = None,
    columns: str | None = None,
    shuffle: int | None = None,
    dedup: Turns | None = None,
    thinking: Thinking = "keep",
) -> Iterator[PromptRow | RejectedRow]:
    """Yield every row of all sources in order, accepted or rejected, in bounded memory.

    paths: each a JSON Lines, JSON or Parquet file, a folder of them or one saved by
        `save_to_disk`, `-` for standard input, or a name that `datasets.load_dataset` takes
        (`NAME:SPLIT` chooses a split); `=TAG` or `=TAG:WEIGHT` may follow.
    limit: only the first `limit` rows, rejected ones included; after shuffling.
    columns: `prompt=question,id=uid`, our names for the source's.
    shuffle: the seed of a random order.
    dedup: reject rows that ask the same as an earlier one; for a run that answers these turns.

    With weights, rows come in proportion to them until a source is used up.
    Raises PipelineError: at once if a source cannot be opened or is empty, while iterating if
    there is no row at all or a source breaks half-way.
    """
    if limit is not None and limit < 1:
        raise PipelineError(f"The row limit is {limit}; it must be at least 1")
    sources = parse_sources([paths] if isinstance(paths, str) else paths)
    names = ColumnNames(columns)
    streams = [_rows(source, open_rows(source.path, names), names, thinking) for source in sources]
    if shuffle is None:
        rows = _in_order(sources, streams)
    elif sources[0].weight is None:
        rows = _shuffled(_in_order(sources, streams), shuffle)
    else:  # each one's share is drawn from the whole of it
        rows = _in_order(sources, [_shuffled(stream, shuffle) for stream in streams])
    return _unique(rows, ", ".join(repr(source.path) for source in sources), limit, dedup)


def _rows(
    source: PromptSource, rows: Iterator[SourceRow], names: ColumnNames, thinking: Thinking
) -> Iterator[_Row]:
    for place, values in map(names.renamed, rows):
        where = f"{source.tag}:{place}" if source.tag else place
        sample_id: str | None = None
        try:
            if isinstance(values, RowReject):
                raise values
            sample_id = read_id(values)
            chat = read_chat(values, thinking)
        except RowReject as reject:
            yield _Row(source.tag, where, sample_id, None, reject.reason, reject.detail)
        else:
            yield _Row(source.tag, where, sample_id, chat, "", "")


def _in_order(sources: Sequence[PromptSource], streams: Sequence[Iterator[_Row]]) -> Iterator[_Row]:
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:
        yield from mixed(streams, weights)
    else:
        for stream in streams:
            yield from stream


def _shuffled(rows: Iterator[_Row], seed: int) -> Iterator[_Row]:
    for text in shuffled((json.dumps(row) for row in rows), seed):
        tag, source, sample_id, chat, reason, detail = json.loads(text)
        yield _Row(tag, source, sample_id, chat and _restored(chat), reason, detail)


def _restored(chat: list[Any]) -> Chat:
    """A chat as json.dumps wrote its tuples."""
    messages, tools, rendered = chat
    turns = (Message(*turn)._replace(tool_calls=tuple(turn[3])) for turn in messages)
    if rendered is not None:
        text, ids, mask = rendered
        rendered = Rendered(text, ids and tuple(ids), mask and tuple(mask))
    return Chat(tuple(turns), tuple(tools), rendered)


def _unique(
    rows: Iterator[_Row], what: str, limit: int | None, dedup: Turns | None
) -> Iterator[PromptRow | RejectedRow]:
    seen, asked = SeenIds(), SeenIds()
    count = 0
    for row in rows:
        count += 1
        yield _accepted(row, seen, asked, dedup)
        if count == limit:
            return
    if count == 0:
        raise PipelineError(f"{what} has no rows; prompts need at least one")


def _accepted(
    row: _Row, seen: "SeenIds", asked: "SeenIds", dedup: Turns | None
) -> PromptRow | RejectedRow:
    """The row as it is, or its reject where an earlier one has its id or asks the same."""
    if row.chat is None:
        return RejectedRow(row.source, row.sample_id, row.reason, row.detail, row.tag)
    question = canonical_json(asking(row.chat, dedup)) if dedup else ""
    if dedup and question in asked:
        detail = "an earlier row asks the same"
        return RejectedRow(row.source, row.sample_id, "duplicate", detail, row.tag)
    sample_id = content_id(row.chat) if row.sample_id is None else row.sample_id
    if not seen.add(sample_id):
        named = row.sample_id is not None
        what = f"the id {quote(sample_id)}" if named else "the same conversation"
        detail = f"an earlier row has {what}"
        return RejectedRow(row.source, sample_id, "duplicate_id", detail, row.tag)
    if dedup:
        asked.add(question)
    return PromptRow(sample_id, row.source, *row.chat, tag=row.tag)


def asking(chat: Chat, turns: Turns) -> Chat:
    """What of a chat decides the answers of a run: rows alike in this would be answered alike.

    turns: which the run answers. Answers in their place do not count, nor what follows the last.
    """
    if turns == "given":
        return chat
    last = max((i for i, turn in enumerate(chat.messages) if turn.is_asking), default=-1)
    asked = chat.messages[: last + 1]
    if turns == "all":
        asked = tuple(turn for turn in asked if not turn.is_answer)
    return chat._replace(messages=asked)


# ---- ids


def read_id(row: Mapping[str, Any]) -> str | None:
    """The row's `id`, else its `sample_id`, as exact text; None if neither is there.

    Raises RowReject: bad_id, long_id, lone_surrogate.
    """
    key = "id" if row.get("id") is not None else "sample_id"
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        kind = type(value).__name__
        raise RowReject("bad_id", f"{key} must be text or a number, not {kind}")
    text = format(value, "f") if isinstance(value, Decimal) else str(value)
    if not text:
        raise RowReject("bad_id", f"{key} is empty text")
    if len(text) > MAX_ID_CHARS:
        raise RowReject("long_id", f"{key} has {len(text)} characters, at most {MAX_ID_CHARS}")
    check_unicode(text, key)
    return text


def canonical_json(chat: Chat) -> str:
    """The one JSON text of a conversation that hashes are taken of; ASCII, no spaces.

    What a turn or a row does not have is not in it, so plain ones are lists of {content, role}.
    """
    turns = []
    for turn in chat.messages:
        rarer = {"thinking": turn.thinking, "tool_calls": turn.tool_calls}
        rarer |= {"name": turn.name, "call_id": turn.call_id}
        present = {key: value for key, value in rarer.items() if value}
        turns.append({"content": turn.content, "role": turn.role, **present})
    whole: object = turns
    if chat.tools or chat.rendered:
        whole = {"messages": turns, "tools": chat.tools, "rendered": chat.rendered}
    return json.dumps(whole, ensure_ascii=True, separators=(",", ":"))


def content_id(chat: Chat) -> str:
    """The id of a row without one: 32 hex digits of the SHA-256 of its normalised turns."""
    return hashlib.sha256(canonical_json(chat).encode()).hexdigest()[:32]


class SeenIds:
    """The texts met so far; in a temporary database file, so memory does not grow with them."""

    def __init__(self) -> None:
        self._ids = sqlite3.connect("")
        self._ids.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{SEEN_CACHE_KIB};"
            "CREATE TABLE ids (digest BLOB PRIMARY KEY) WITHOUT ROWID;"
        )

    def add(self, text: str) -> bool:
        """Take up a text; False if it was there already."""
        values = (_digest(text),)
        return self._ids.execute("INSERT OR IGNORE INTO ids VALUES (?)", values).rowcount == 1

    def __contains__(self, text: str) -> bool:
        found = self._ids.execute("SELECT 1 FROM ids WHERE digest = ?", (_digest(text),))
        return found.fetchone() is not None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class PromptHasher:
    """One SHA-256 over the accepted rows of a run in order: ids, normalised turns, tags."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, row: PromptRow) -> None:
        """Add a row. Line breaks inside texts are escaped, so rows cannot run together."""
        tag = f" {row.tag}" if row.tag else ""
        line = f"{json.dumps(row.sample_id)} {canonical_json(row.chat)}{tag}\n"
        self._sha256.update(line.encode())

    def hexdigest(self) -> str:
        """The hash of all rows so far, 64 hex digits."""
        return self._sha256.hexdigest()
