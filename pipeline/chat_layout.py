"""Where each turn's text stands in a template's rendering.

The template is a black box: it is rendered with a placeholder for every content and thought, which
shows the fixed texts around them, and then with the texts themselves.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pipeline.chat_encoding import letters_of, texts_in, with_texts
from pipeline.errors import RowReject
from pipeline.prompt_turns import Message

Render = Callable[[Sequence[Message]], str]


class Layout(NamedTuple):
    """A rendering cut at its answers: segment 0, answer 0, segment 1, … as printed.

    There is one segment more than there are answers; the last may be empty.
    """

    segments: list[str]
    answers: list[str]


class Slot(NamedTuple):
    """A text of a turn; thought: its thinking, else its content."""

    turn: int
    thought: bool


def lay_out(
    messages: Sequence[Message],
    render: Render,
    render_prompt: Render,
    *,
    thoughts_may_go: bool = False,
) -> Layout:
    """Find each turn's text in the rendering, so that nothing is lost, added or rewritten.

    The template is rendered twice: with a placeholder for every text, which gives the fixed
    texts, and with the texts. The second must be the first with each text filled in, as it is or
    stripped. An answer whose thought is printed starts where its generation header ends.

    render, render_prompt: the template without and with the header of an answer at the end.
    thoughts_may_go: whether the template may leave out thoughts.
    Raises RowReject: template_drops_text, history_changes, and what rendering raises.
    """
    pieces = _fixed_pieces(messages, render, thoughts_may_go)
    text = render(messages)
    layout = Layout([""], [])
    position, opened = 0, ""  # opened: an answer up to the end of its thought
    for (fixed, slot), (following, _) in pairwise([*pieces, ("", None)]):
        if not text.startswith(fixed, position):
            raise RowReject("template_drops_text", "the text of a turn changes others' text")
        start, position = position, position + len(fixed)
        if slot is None:
            layout.segments[-1] += fixed
            break
        message = messages[slot.turn]
        printed = _printed_form(message, slot, text, position, following)
        position += len(printed)
        if not message.is_answer:
            layout.segments[-1] += fixed + printed
        elif slot.thought:
            cut = _answer_start(messages, slot.turn, text, render_prompt) - start
            if not 0 <= cut <= len(fixed):
                raise RowReject("history_changes", _no_start(slot.turn))
            layout.segments[-1] += fixed[:cut]
            opened = fixed[cut:] + printed
        else:
            if not opened:
                layout.segments[-1] += fixed
            layout.answers.append(opened + fixed + printed if opened else printed)
            layout.segments.append("")
            opened = ""
    if position != len(text):
        raise RowReject("template_drops_text", "the template adds text after the last turn")
    return layout


def _answer_start(messages: Sequence[Message], turn: int, text: str, render_prompt: Render) -> int:
    prompt = render_prompt(messages[:turn])
    if not text.startswith(prompt):
        raise RowReject("history_changes", _no_start(turn))
    return len(prompt)


def _no_start(turn: int) -> str:
    return f"where the answer of turn {turn} starts, before its thought, cannot be told"


def _fixed_pieces(
    messages: Sequence[Message], render: Render, thoughts_may_go: bool
) -> list[tuple[str, Slot | None]]:
    """The fixed texts in printed order, each with the slot that follows it; None at the end.

    Printed order need not be the turns' order: some templates move the system turn.
    """
    marks = slot_marks(messages)
    text = render(with_marks(messages, marks))
    for slot, mark in list(marks.items()):
        count = text.count(mark)
        if count == 0 and slot.thought and thoughts_may_go:
            del marks[slot]
        elif count != 1:
            role, what = messages[slot.turn].role, "the thought of turn" if slot.thought else "turn"
            detail = f"{what} {slot.turn} ({role}) is printed {count} times"
            raise RowReject("template_drops_text", detail)
    order = sorted(marks, key=lambda slot: text.index(marks[slot]))
    answers = [slot for slot in order if messages[slot.turn].is_answer]
    if answers != sorted(answers, key=lambda slot: (slot.turn, not slot.thought)):
        raise RowReject("template_drops_text", "the answers are printed in another order")
    pieces: list[tuple[str, Slot | None]] = []
    position = 0
    for slot in order:
        start = text.index(marks[slot])
        pieces.append((text[position:start], slot))
        position = start + len(marks[slot])
    return [*pieces, (text[position:], None)]


def slot_marks(messages: Sequence[Message]) -> dict[Slot, str]:
    """A placeholder for every text of a turn: letters only, found in none of the texts."""
    texts = "\0".join(text for message in messages for text in texts_in(message))
    digest = hashlib.sha256(texts.encode()).hexdigest()
    slots = [
        Slot(turn, thought)
        for turn, message in enumerate(messages)
        for thought in (True, False)
        if (message.thinking if thought else message.content)
    ]
    salt = 0
    while True:
        marks = [
            letters_of(f"{digest} {salt} {turn}" + (" thought" if thought else ""))
            for turn, thought in slots
        ]
        if not any(mark in texts for mark in marks):
            return dict(zip(slots, marks, strict=True))
        salt += 1


def with_marks(messages: Sequence[Message], marks: dict[Slot, str]) -> list[Message]:
    """The turns with placeholders in place of their texts, where there is one."""
    return [
        message._replace(
            content=marks.get(Slot(turn, False), message.content),
            thinking=marks.get(Slot(turn, True), message.thinking),
        )
        for turn, message in enumerate(messages)
    ]


def with_marked_answers(messages: Sequence[Message]) -> list[Message]:
    """The turns with a placeholder alone in place of each answer, as `Message.content`."""
    marks = slot_marks(messages)
    return [
        Message("assistant", marks[Slot(turn, False)]) if message.is_answer else message
        for turn, message in enumerate(messages)
    ]


def _printed_form(message: Message, slot: Slot, text: str, position: int, following: str) -> str:
    """How a text stands at a position of the rendering: as it is, stripped, or, of a tool's
    result, as JSON. Raises RowReject if it stands there in no such form."""
    given = message.thinking if slot.thought else message.content
    forms = [given, given.strip(), given.lstrip(), given.rstrip()]
    if message.role == "tool":
        forms += [json.dumps(form, ensure_ascii=False)[1:-1] for form in forms]
    for form in forms:
        if text.startswith(form, position) and text.startswith(following, position + len(form)):
            return form
    what = f"the thought of turn {slot.turn}" if slot.thought else f"turn {slot.turn}"
    detail = f"{what} ({message.role}) is not printed as it is, nor stripped"
    raise RowReject("template_drops_text", detail)


def check_tools_printed(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
) -> None:
    """Raise RowReject template_drops_text where a tool or a call is not printed.

    Names and the texts of arguments become placeholders, which must all be there.
    """
    expected: dict[str, str] = {}

    def mark(text: str, what: str) -> str:
        word = letters_of(f"{what} {len(expected)} {text}")
        expected[word] = what
        return word

    def marked_call(call: dict[str, Any], what: str) -> dict[str, Any]:
        function = dict(call["function"])
        function["name"] = mark(function["name"], f"{what}: its name")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            function["arguments"] = {
                key: with_texts(value, lambda text: mark(text, f"{what}: its arguments"))
                for key, value in arguments.items()
            }
        return {**call, "function": function}

    turns = [
        message._replace(
            tool_calls=tuple(
                marked_call(call, f"call {i} of turn {turn}")
                for i, call in enumerate(message.tool_calls)
            )
        )
        for turn, message in enumerate(messages)
    ]
    marked = [marked_call(tool, f"tool {i}") for i, tool in enumerate(tools)]
    text = render(turns, marked)
    for word, what in expected.items():
        if word not in text:
            raise RowReject("template_drops_text", f"{what} not printed")


def interleave(segments: Sequence[str], answers: Sequence[str]) -> str:
    """Segment 0, answer 0, segment 1, … as one text; one segment more than answers."""
    return "".join(a + b for a, b in zip(segments, [*answers, ""], strict=True))
