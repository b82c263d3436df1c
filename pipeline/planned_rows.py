"""One accepted prompt to the token ids that a run plans with; `pipeline prompts` does the same."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.chat import ChatRenderer
from pipeline.chat_encoding import Int32Array
from pipeline.conversation import Conversation
from pipeline.errors import PipelineError, RowReject
from pipeline.prompt_rendered import Rendered
from pipeline.prompt_settings import PromptSettings
from pipeline.prompts import PromptRow


class PlannedRow(NamedTuple):
    """segments: the fixed ids before each answer; given_mask: only of a row that is given whole,
    uint8-valued, 1 on answers and their end-of-turn tokens."""

    segments: list[list[int]]
    given_mask: list[int] | None


def make_renderer(settings: PromptSettings, tokenizer: Any, eos_ids: Iterable[int]) -> ChatRenderer:
    """The renderer of a run with these settings. Raises PipelineError."""
    return ChatRenderer(
        tokenizer,
        template=_template(settings),
        template_args=template_args(settings.template_arg),
        eos_ids=frozenset(eos_ids),
        control_tokens=settings.control_tokens,
        thinking=settings.thinking,
    )


def _template(settings: PromptSettings) -> str | None:
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--chat-template {settings.chat_template}: {error}") from error


def template_args(given: Iterable[str]) -> dict[str, Any]:
    """`enable_thinking=false` as {"enable_thinking": False}: a JSON value, else text.

    Raises PipelineError: not of that form, a name twice, or one that templates have from us.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise PipelineError(f"--template-arg {text}: must be NAME=VALUE")
        if name in found or name in ("messages", "tools", "add_generation_prompt"):
            raise PipelineError(f"--template-arg {text}: {name} is given already")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def plan_row(
    row: PromptRow, renderer: ChatRenderer, settings: PromptSettings, longest: int
) -> PlannedRow:
    """The ids of a row; longest: of a row, prompt plus answers. Raises RowReject."""
    planned = _planned(row, renderer, settings)
    size, room = len(planned.segments[0]), int(planned.given_mask is None)
    if size + room > longest:
        detail = f"{size} tokens, and a row holds {longest} (--max-length)"
        raise RowReject("too_long", detail)
    return planned


def _planned(row: PromptRow, renderer: ChatRenderer, settings: PromptSettings) -> PlannedRow:
    if row.rendered is not None:
        return _rendered(row.rendered, renderer, settings)
    if settings.turns == "given":
        given = renderer.given_row(row.messages, row.tools)
        return PlannedRow([given.ids.tolist()], given.loss_mask.tolist())
    start = Conversation.all_turns if settings.turns == "all" else Conversation.last_turn
    segments = start(renderer, row.messages, row.tools).segments
    return PlannedRow([ids.tolist() for ids in segments], None)


def _rendered(rendered: Rendered, renderer: ChatRenderer, settings: PromptSettings) -> PlannedRow:
    """A prompt that came as text with its control tokens or as ids: taken as it is, once it
    starts and ends as the template's own do."""
    if rendered.text is not None:
        ids = renderer.encode(rendered.text)
    else:
        ids = np.array(rendered.ids, dtype=np.int32)
        if ids.max() >= renderer.vocab_size:
            detail = f"id {ids.max()} is not in the vocabulary of {renderer.vocab_size}"
            raise RowReject("bad_token_ids", detail)
    bos = renderer.bos_id
    starts = 0 if bos is None else int(ids[0] == bos) + int(ids[:2].tolist() == [bos, bos])
    if bos is not None and starts != 1:
        raise RowReject("bad_bos", f"it starts with {starts} BOS tokens (id {bos})")
    if settings.turns == "given":
        if rendered.loss_mask is None or not any(rendered.loss_mask):
            detail = "a rendered row needs input_ids with a loss_mask that is 1 on its answers"
            raise RowReject("no_assistant_turn", detail)
        return PlannedRow([ids.tolist()], list(rendered.loss_mask))
    after = _after_last(ids, renderer.encode(renderer.header))
    if after is None or renderer.eos_ids.intersection(after.tolist()):
        raise RowReject("no_open_answer", f"it does not end with {renderer.header!r}")
    return PlannedRow([ids.tolist()], None)


def _after_last(ids: Int32Array, header: Int32Array) -> Int32Array | None:
    """What follows the last place where the header stands; None if it stands nowhere."""
    for start in range(len(ids) - len(header), -1, -1):
        if np.array_equal(ids[start : start + len(header)], header):
            return ids[start + len(header) :]
    return None
