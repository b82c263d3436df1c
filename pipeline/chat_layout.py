"""Where each turn's text stands in a template's rendering.

The template is a black box: it is rendered with a placeholder for every content, which shows the
fixed texts around them, and then with the contents.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeline.errors import RowReject
from pipeline.prompts import Message

Render = Callable[[Sequence[Message]], str]


class Layout(NamedTuple):
    """A rendering cut at its answers: segment 0, answer 0, segment 1, … as printed.

    There is one segment more than there are answers; the last may be empty.
    """

    segments: list[str]
    answers: list[str]


def lay_out(messages: Sequence[Message], render: Render) -> Layout:
    """Find each turn's text in the rendering, so that nothing is lost, added or rewritten.

    The template is rendered twice: with a placeholder for every content, which gives the
    fixed texts, and with the contents. The second must be the first with each content
    filled in, as it is or stripped.
    """
    pieces = _fixed_pieces(messages, render)
    text = render(messages)
    layout = Layout([""], [])
    position = 0
    for (fixed, turn), (following, _) in pairwise([*pieces, ("", -1)]):
        if not text.startswith(fixed, position):
            raise RowReject("template_drops_text", "the text of a turn changes others' text")
        position += len(fixed)
        layout.segments[-1] += fixed
        if turn < 0:
            break
        role, content = messages[turn]
        printed = _printed_form(content, text, position, following)
        if printed is None:
            detail = f"turn {turn} ({role}) is not printed as it is, nor stripped"
            raise RowReject("template_drops_text", detail)
        position += len(printed)
        if role == "assistant":
            layout.answers.append(printed)
            layout.segments.append("")
        else:
            layout.segments[-1] += printed
    if position != len(text):
        raise RowReject("template_drops_text", "the template adds text after the last turn")
    return layout


def _fixed_pieces(messages: Sequence[Message], render: Render) -> list[tuple[str, int]]:
    """The fixed texts in printed order, each with the turn that follows it; -1 at the end.

    Printed order need not be the turns' order: some templates move the system turn.
    """
    marked = with_marks(messages, roles={"system", "user", "assistant"})
    text = render(marked)
    for turn, (role, mark) in enumerate(marked):
        if (count := text.count(mark)) != 1:
            detail = f"turn {turn} ({role}) is printed {count} times"
            raise RowReject("template_drops_text", detail)
    order = sorted(range(len(marked)), key=lambda turn: text.index(marked[turn].content))
    answers = [turn for turn in order if marked[turn].role == "assistant"]
    if answers != sorted(answers):
        raise RowReject("template_drops_text", "the answers are printed in another order")
    pieces, position = [], 0
    for turn in order:
        start = text.index(marked[turn].content)
        pieces.append((text[position:start], turn))
        position = start + len(marked[turn].content)
    return [*pieces, (text[position:], -1)]


def with_marks(messages: Sequence[Message], *, roles: Collection[str]) -> list[Message]:
    """The turns of these roles get a placeholder: letters only, found in no turn's text.

    Letters survive every template's stripping and quoting.
    """
    texts = "\0".join(content for _, content in messages)
    digest = hashlib.sha256(texts.encode()).hexdigest()
    salt = 0
    while True:
        marks = [_mark(f"{digest} {salt} {turn}") for turn in range(len(messages))]
        if not any(mark in texts for mark in marks):
            break
        salt += 1
    return [
        Message(role, mark if role in roles else content)
        for (role, content), mark in zip(messages, marks, strict=True)
    ]


def _mark(seed: str) -> str:
    digest = hashlib.sha256(seed.encode()).digest()
    return "Q" + "".join(chr(ord("a") + byte % 26) for byte in digest)


def _printed_form(content: str, text: str, position: int, following: str) -> str | None:
    """How a content stands at a position of the text: as it is or stripped; None if neither."""
    for form in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(form, position) and text.startswith(following, position + len(form)):
            return form
    return None


def interleave(segments: Sequence[str], answers: Sequence[str]) -> str:
    """Segment 0, answer 0, segment 1, … as one text; one segment more than answers."""
    return "".join(a + b for a, b in zip(segments, [*answers, ""], strict=True))
