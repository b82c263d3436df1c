"""The turns of one row, whichever convention it follows; a null value counts as absent everywhere.

Told apart row by row, and turn by turn where it has turns: `messages` ([{role, content}, …]);
ShareGPT's `conversations` ([{from, value}, …]); Alpaca's `instruction`, with `input` after an empty
line and `output` as the answer; a plain `prompt`, with `completion` or `response` as the answer; a
prompt as the target model reads it, `text` or `input_ids`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.errors import RowReject
from pipeline.prompt_rendered import Rendered, read_ids
from pipeline.prompt_rows import (
    ANSWER_KEYS,
    INPUT_KEY,
    PAIRS,
    RENDERED,
    TURNS,
    NumberText,
    quote,
)
from pipeline.prompt_tools import check_unicode, read_call_text, read_calls, read_tools

Turns = Literal["all", "last", "given"]  # which the target model answers
Thinking = Literal["keep", "drop", "template"]

ROLES: dict[str, str] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
# What encloses a thought at the start of an answer's text.
THINKING_MARKS = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"))


class Message(NamedTuple):
    """One turn.

    role: user, assistant, system or tool.
    content: valid Unicode, blank only beside calls.
    thinking: what an answer's thought says, without the marks around it.
    tool_calls: as templates expect them, arguments decoded.
    name, call_id: what a tool's turn answers.
    """

    role: str
    content: str
    thinking: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    call_id: str = ""

    @property
    def is_answer(self) -> bool:
        """Whether the target model may answer in its place. A turn that calls tools is context:
        the results that follow are of this very call."""
        return self.role == "assistant" and not self.tool_calls

    @property
    def is_asking(self) -> bool:
        """Whether an answer may follow."""
        return self.role in ("user", "tool")

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; thoughts under every name that templates know."""
        told: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            told.update(dict.fromkeys(THINKING_KEYS, self.thinking))
        if self.tool_calls:
            told["tool_calls"] = list(self.tool_calls)
        if self.name:
            told["name"] = self.name
        if self.call_id:
            told["tool_call_id"] = self.call_id
        return told


class Chat(NamedTuple):
    """What a row asks: turns, with the tools that may be called, or a rendered prompt."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    rendered: Rendered | None = None


def read_chat(row: Mapping[str, Any], thinking: Thinking = "keep") -> Chat:
    """The turns of a row in one convention.

    thinking: thoughts stay where they are, are dropped, or are given to the template apart from
        the answer, to print or not.

    Raises RowReject with a code of prompt_reasons.REJECT_REASONS.
    """
    # Datasets of turns often repeat the first one as `prompt`: turns are the whole.
    given: list[str] = []
    for names in (TURNS, PAIRS, RENDERED):
        given = given or [key for key in names if row.get(key) is not None]
    if not given:
        known = ", ".join((*TURNS, *PAIRS, *RENDERED))
        raise RowReject("no_messages", f"the row needs one of {known}")
    if len(given) > 1:
        raise RowReject("both_conventions", f"give one of {' and '.join(given)}")
    if given[0] == "text":
        return Chat((), rendered=Rendered(_read_content(row["text"], "text"), None, None))
    if given[0] == "input_ids":
        return Chat((), rendered=read_ids(row))
    if given[0] in TURNS:
        messages = _read_turns(row[given[0]], given[0], thinking)
    else:
        messages = _read_pair(row, given[0], thinking)
    if row.get("system") is not None:
        messages.insert(0, Message("system", _read_content(row["system"], "system")))
    _check_order(messages)
    return Chat(tuple(messages), read_tools(row))


# ---- turns


def _read_turns(turns: object, key: str, thinking: Thinking) -> list[Message]:
    if not isinstance(turns, list):
        raise RowReject("bad_turn", f"{key} must be a list, not {type(turns).__name__}")
    if not turns:
        raise RowReject("empty_conversation", f"{key} is an empty list")
    return [_read_turn(turn, f"{key}[{i}]", thinking) for i, turn in enumerate(turns)]


def _read_pair(row: Mapping[str, Any], key: str, thinking: Thinking) -> list[Message]:
    """A question under `key`, perhaps with an answer; blank input or output counts as none."""
    names = [name for name in ANSWER_KEYS[key] if _is_text(row.get(name))]
    if len(names) > 1:
        raise RowReject("bad_turn", f"the row has both {names[0]} and {names[1]}")
    if isinstance(row[key], list):  # a prompt may be turns
        messages = _read_turns(row[key], key, thinking)
    else:
        content = _read_content(row[key], key)
        if key == "instruction" and _is_text(row.get(INPUT_KEY)):
            content = f"{content}\n\n{_read_content(row[INPUT_KEY], INPUT_KEY)}"
        messages = [Message("user", content)]
    for name in names:
        answer = row[name]
        if isinstance(answer, list) and all(isinstance(turn, dict) for turn in answer):
            messages += _read_turns(answer, name, thinking)
        else:
            messages.append(_answer(_read_content(answer, name), "", name, thinking))
    return messages


def _is_text(value: object) -> bool:
    """Whether there is something: null and blank text are nothing, a number is an error later."""
    return value is not None and not (type(value) is str and not value.strip())


def _read_turn(turn: object, where: str, thinking: Thinking) -> Message:
    if not isinstance(turn, dict):
        raise RowReject("bad_turn", f"{where} must be an object, not {type(turn).__name__}")
    name = _one_of(turn, ("role", "from"), where)
    if type(name) is not str:
        raise RowReject("bad_turn", f"{where} has no role (or from) that is text")
    if name not in ROLES:
        raise RowReject("unknown_role", f"{where} has the role {quote(name)}")
    role = ROLES[name]
    content = _one_of(turn, ("content", "value"), where)
    if name == "function_call":
        calls = read_call_text(content, where)
        return Message("assistant", "", tool_calls=calls)
    calls = read_calls(turn, where)
    if role != "assistant" and calls:
        raise RowReject("bad_tool_call", f"{where} is a {role} turn and calls tools")
    if role == "tool":
        return Message(
            role,
            _read_content(content, where),
            name=_read_name(turn, "name", where),
            call_id=_read_name(turn, "tool_call_id", where),
        )
    if role != "assistant":
        return Message(role, _read_content(content, where))
    text = "" if calls and not _is_text(content) else _read_content(content, where)
    thought = _one_of(turn, THINKING_KEYS, where)
    if thought is not None and type(thought) is not str:
        raise RowReject("bad_content", f"the thinking of {where} is no text")
    check_unicode(thought or "", where)
    return _answer(text, thought or "", where, thinking)._replace(tool_calls=calls)


def _answer(content: str, thought: str, where: str, thinking: Thinking) -> Message:
    """An assistant turn, with its thought where `thinking` puts it."""
    if thinking != "keep":
        inline, content = split_thought(content)
        if inline.strip() and thought.strip() and inline.strip() != thought.strip():
            raise RowReject("bad_turn", f"{where} has two thoughts, in its text and beside it")
        if inline and not content.strip():
            raise RowReject("empty_content", f"{where} is nothing but a thought")
        thought = "" if thinking == "drop" else thought or inline
    return Message("assistant", content, thought if thought.strip() else "")


def split_thought(text: str) -> tuple[str, str]:
    """The thought that a text starts with and the rest, both stripped of the lines between."""
    start = text.lstrip()
    for opening, closing in THINKING_MARKS:
        if start.startswith(opening) and closing in start:
            thought, _, rest = start.removeprefix(opening).partition(closing)
            return thought.strip("\n"), rest.lstrip("\n")
    return "", text


def _read_name(turn: dict[str, Any], key: str, where: str) -> str:
    value = turn.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowReject("bad_turn", f"{where} has a {key} that is no text")
    check_unicode(value, where)
    return str(value)


def _one_of(turn: dict[str, Any], names: Sequence[str], where: str) -> object:
    """The value under any of the names; several at once would leave the choice to chance."""
    found = [name for name in names if turn.get(name) is not None]
    if len(found) > 1:
        raise RowReject("bad_turn", f"{where} has both {found[0]} and {found[1]}")
    return turn[found[0]] if found else None


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
    check_unicode(content, where)
    return content


def _read_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowReject("bad_content", f"{where} is {quote(kind)}, not a text part")
    text = part.get("text")
    if type(text) is not str:
        raise RowReject("bad_content", f"{where} has no text")
    return text


def _check_order(messages: Sequence[Message]) -> None:
    previous = Message("", "")
    for index, message in enumerate(messages):
        role, turns = message.role, f"turns {index - 1} and {index}"
        if role == "system" and index > 0:
            raise RowReject("system_not_first", f"turn {index} is a system turn")
        if role == "assistant" and previous.role in ("", "system"):
            raise RowReject("assistant_first", f"turn {index} answers no user turn")
        if role == "tool" and not (previous.role == "tool" or previous.tool_calls):
            raise RowReject("tool_order", f"turn {index} is a tool's, and no call precedes it")
        if role == "user" and previous.role == "tool":
            raise RowReject("tool_order", f"turn {index} is the user's, right after a tool's")
        if role == previous.role and role != "tool":
            raise RowReject("consecutive_roles", f"{turns} are both {role}")
        previous = message
    if all(message.role != "user" for message in messages):
        raise RowReject("no_user_turn", "there is nothing to answer")
