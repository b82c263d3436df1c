"""Prompts: any chat source becomes `PromptRow`s of one shape, each bad row a `RejectedRow`.

A row is an object in one of four conventions, told apart row by row (turn by turn where it has
turns): `messages` ([{role, content}, …]); ShareGPT's `conversations` ([{from, value}, …]); Alpaca's
`instruction`, with `input` after an empty line and `output` as the answer; a plain `prompt`, with
`completion` or `response` as the answer. `id` or `sample_id` names it, a `system` text is its first
turn, the role developer is system. Beside turns `instruction` and `prompt` are ignored, and so are
other keys everywhere.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from pipeline.errors import PipelineError, RowReject
from pipeline.prompt_rows import (
    ANSWER_KEYS,
    INPUT_KEY,
    PAIRS,
    TURNS,
    ColumnNames,
    NumberText,
    SourceRow,
    quote,
)
from pipeline.prompt_sources import open_rows

SEEN_CACHE_KIB = 64 * 2**10  # of ids held in memory
MAX_ID_CHARS = 1024

# What each reject code means. The codes after `duplicate_id` come from rendering (chat.py).
REJECT_REASONS: dict[str, str] = {
    "line_too_long": "the line is longer than 64 MiB",
    "bad_encoding": "the text is not valid UTF-8",
    "bad_json": "the line is not one JSON value",
    "too_deep": "the JSON nests deeper than 100 levels",
    "duplicate_key": "an object of the row has the same key twice",
    "non_finite_number": "the row has NaN or Infinity, which are not JSON",
    "not_an_object": "the line is JSON, but not an object",
    "no_messages": "none of messages, conversations, instruction and prompt is given",
    "both_conventions": "messages and conversations are both given, or instruction and prompt",
    "empty_conversation": "the conversation has no turns",
    "bad_turn": "the conversation is no list, or a turn is not one role and one content",
    "unknown_role": "the role is none of user/human, assistant/gpt, system/developer",
    "unsupported_role": "tool roles, tool calls and tool definitions are not supported yet",
    "empty_content": "a turn's content is null, empty or blank",
    "bad_content": "a turn's content is neither text nor a list of text parts",
    "lone_surrogate": "a text has half a surrogate pair, which is no character",
    "system_not_first": "a system turn stands after another turn",
    "assistant_first": "an assistant turn comes before the first user turn",
    "consecutive_roles": "two turns of the same role follow each other",
    "no_user_turn": "the conversation has no user turn",
    "bad_id": "the id is neither text nor a number, or is empty",
    "long_id": "the id is longer than 1024 characters",
    "duplicate_id": "an earlier row has the same id (or, without ids, the same conversation)",
    "template_refused": "the chat template raised an error on this conversation",
    "template_limit": "rendering takes too much time, memory or text",
    "template_drops_text": "the chat template leaves out, repeats or rewrites the text of a turn",
    "history_changes": "the chat template prints earlier turns differently once others follow",
    "control_token": "the text of a turn contains a control token of the tokenizer",
    "no_assistant_turn": "given turns were asked for, but there is no assistant turn",
    "answers_touch": "the chat template puts nothing between two answers",
}

ROLES: dict[str, str] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
    "developer": "system",
}
TOOL_ROLES = frozenset({"tool", "function", "ipython", "observation", "function_call"})


class Message(NamedTuple):
    """One turn. role: user, assistant or system; content: not blank, valid Unicode."""

    role: str
    content: str


class PromptRow(NamedTuple):
    """One accepted row; source: `file.jsonl:12` or `dataset:12`, 1-based."""

    sample_id: str
    source: str
    messages: tuple[Message, ...]


class RejectedRow(NamedTuple):
    """One rejected row; reason: a key of REJECT_REASONS; sample_id: None without a usable id."""

    source: str
    sample_id: str | None
    reason: str
    detail: str


def read_prompts(
    path: str, *, limit: int | None = None, columns: str | None = None
) -> Iterator[PromptRow | RejectedRow]:
    """Yield every row of a source in order, accepted or rejected, in bounded memory.

    path: a JSON Lines or Parquet file, a folder saved by `save_to_disk`, or a name or folder
        that `datasets.load_dataset` takes (`NAME:SPLIT` chooses a split).
    limit: read only the first `limit` rows, rejected ones included.

    Raises PipelineError: at once if the source cannot be opened or is empty, while iterating if
    it has no row at all or breaks half-way.
    """
    if limit is not None and limit < 1:
        raise PipelineError(f"The row limit is {limit}; it must be at least 1")
    names = ColumnNames(columns)
    return _read(map(names.renamed, open_rows(path, names)), path, limit)


def _read(
    rows: Iterator[SourceRow], path: str, limit: int | None
) -> Iterator[PromptRow | RejectedRow]:
    seen = SeenIds()
    count = 0
    for source, row in rows:
        count += 1
        yield normalise_row(source, row, seen)
        if count == limit:
            return
    if count == 0:
        raise PipelineError(f"{path!r} has no rows; prompts need at least one")


def normalise_row(
    source: str, row: Mapping[str, Any] | RowReject, seen: "SeenIds"
) -> PromptRow | RejectedRow:
    """Turn one row of a source into a PromptRow, or say why not."""
    sample_id: str | None = None
    try:
        if isinstance(row, RowReject):
            raise row
        sample_id = read_id(row)
        messages = normalise_messages(row)
        named = sample_id is not None
        sample_id = sample_id if sample_id is not None else content_id(messages)
        if not seen.add(sample_id):
            what = f"the id {quote(sample_id)}" if named else "the same conversation"
            raise RowReject("duplicate_id", f"an earlier row has {what}")
    except RowReject as reject:
        return RejectedRow(source, sample_id, reject.reason, reject.detail)
    return PromptRow(sample_id, source, messages)


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
    _check_unicode(text, key)
    return text


def canonical_json(messages: Sequence[Message]) -> str:
    """The one JSON text of a conversation that hashes are taken of; ASCII, no spaces."""
    turns = [{"content": content, "role": role} for role, content in messages]
    return json.dumps(turns, ensure_ascii=True, separators=(",", ":"))


def content_id(messages: Sequence[Message]) -> str:
    """The id of a row without one: 32 hex digits of the SHA-256 of its normalised turns."""
    return hashlib.sha256(canonical_json(messages).encode()).hexdigest()[:32]


class SeenIds:
    """The ids met so far; in a temporary database file, so memory does not grow with them."""

    def __init__(self) -> None:
        self._ids = sqlite3.connect("")
        self._ids.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{SEEN_CACHE_KIB};"
            "CREATE TABLE ids (digest BLOB PRIMARY KEY) WITHOUT ROWID;"
        )

    def add(self, sample_id: str) -> bool:
        """Take up an id; False if it was there already."""
        digest = hashlib.blake2b(sample_id.encode(), digest_size=16).digest()
        return self._ids.execute("INSERT OR IGNORE INTO ids VALUES (?)", (digest,)).rowcount == 1


class PromptHasher:
    """One SHA-256 over the accepted rows of a run in order: their ids and normalised turns."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, row: PromptRow) -> None:
        """Add a row. Line breaks inside texts are escaped, so rows cannot run together."""
        line = f"{json.dumps(row.sample_id)} {canonical_json(row.messages)}\n"
        self._sha256.update(line.encode())

    def hexdigest(self) -> str:
        """The hash of all rows so far, 64 hex digits."""
        return self._sha256.hexdigest()


# ---- turns


def normalise_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns of a row in one convention; a null value counts as absent everywhere.

    Raises RowReject with a code of REJECT_REASONS.
    """
    # Datasets of turns often repeat the first one as `prompt`: turns are the whole.
    given = [key for key in TURNS if row.get(key) is not None]
    given = given or [key for key in PAIRS if row.get(key) is not None]
    if not given:
        raise RowReject("no_messages", f"the row needs one of {', '.join((*TURNS, *PAIRS))}")
    if len(given) > 1:
        raise RowReject("both_conventions", f"give one of {' and '.join(given)}")
    for key in ("tools", "functions"):
        if row.get(key):
            raise RowReject("unsupported_role", f"the row defines {key}")
    if given[0] in TURNS:
        messages = _read_turns(row[given[0]], given[0])
    else:
        messages = _read_pair(row, given[0])
    if row.get("system") is not None:
        messages.insert(0, Message("system", _read_content(row["system"], "system")))
    _check_order(messages)
    return tuple(messages)


def _read_turns(turns: object, key: str) -> list[Message]:
    if not isinstance(turns, list):
        raise RowReject("bad_turn", f"{key} must be a list, not {type(turns).__name__}")
    if not turns:
        raise RowReject("empty_conversation", f"{key} is an empty list")
    return [_read_turn(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]


def _read_pair(row: Mapping[str, Any], key: str) -> list[Message]:
    """A question under `key`, perhaps with an answer; blank input or output counts as none."""
    if isinstance(row[key], list):  # a prompt may be turns
        return _read_turns(row[key], key)
    content = _read_content(row[key], key)
    if key == "instruction" and _is_text(row.get(INPUT_KEY)):
        content = f"{content}\n\n{_read_content(row[INPUT_KEY], INPUT_KEY)}"
    messages = [Message("user", content)]
    found = [name for name in ANSWER_KEYS[key] if _is_text(row.get(name))]
    if len(found) > 1:
        raise RowReject("bad_turn", f"the row has both {found[0]} and {found[1]}")
    if found:
        messages.append(Message("assistant", _read_content(row[found[0]], found[0])))
    return messages


def _is_text(value: object) -> bool:
    """Whether there is something: null and blank text are nothing, a number is an error later."""
    return value is not None and not (type(value) is str and not value.strip())


def _read_turn(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise RowReject("bad_turn", f"{where} must be an object, not {type(turn).__name__}")
    for key in ("tool_calls", "function_call", "tool_call_id"):
        if turn.get(key):
            raise RowReject("unsupported_role", f"{where} has {key}")
    name = _one_of(turn, "role", "from", where)
    if type(name) is not str:
        raise RowReject("bad_turn", f"{where} has no role (or from) that is text")
    if name in TOOL_ROLES:
        raise RowReject("unsupported_role", f"{where} has the role {quote(name)}")
    if name not in ROLES:
        raise RowReject("unknown_role", f"{where} has the role {quote(name)}")
    return Message(ROLES[name], _read_content(_one_of(turn, "content", "value", where), where))


def _one_of(turn: dict[str, Any], first: str, second: str, where: str) -> object:
    """The value under either name; both at once would leave the choice to chance."""
    found = [turn[key] for key in (first, second) if turn.get(key) is not None]
    if len(found) == 2:
        raise RowReject("bad_turn", f"{where} has both {first} and {second}")
    return found[0] if found else None


def _read_content(content: object, where: str) -> str:
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{where} part {i}") for i, part in enumerate(content))
    if content is None:
        raise RowReject("empty_content", f"{where} has no content")
    if type(content) is not str:
        kind = "number" if isinstance(content, NumberText) else type(content).__name__
        raise RowReject("bad_content", f"the content of {where} is a {kind}, not text")
    if not content.strip():
        raise RowReject("empty_content", f"the content of {where} is blank")
    _check_unicode(content, where)
    return content


def _read_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowReject("bad_content", f"{where} is {quote(kind)}, not a text part")
    text = part.get("text")
    if type(text) is not str:
        raise RowReject("bad_content", f"{where} has no text")
    return text


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"{where} has {quote(text[error.start])} alone at character {error.start}"
        raise RowReject("lone_surrogate", detail) from None


def _check_order(messages: Sequence[Message]) -> None:
    previous = ""
    for index, (role, _) in enumerate(messages):
        if role == "system" and index > 0:
            raise RowReject("system_not_first", f"turn {index} is a system turn")
        if role == "assistant" and previous in ("", "system"):
            raise RowReject("assistant_first", f"turn {index} answers no user turn")
        if role == previous:
            raise RowReject("consecutive_roles", f"turns {index - 1} and {index} are both {role}")
        previous = role
    if all(role != "user" for role, _ in messages):
        raise RowReject("no_user_turn", "there is nothing to answer")
