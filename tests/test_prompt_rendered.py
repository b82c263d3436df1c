"""Prompts that come rendered, as text or ids: taken as they are, or rejected with a reason."""

from typing import Any

import pytest
from chats import chat, renderer_for, text_of

from pipeline.chat_layout import interleave
from pipeline.errors import RowReject
from pipeline.planned_rows import PlannedRow, plan_row
from pipeline.prompt_rendered import Rendered
from pipeline.prompt_settings import PromptSettings
from pipeline.prompts import PromptRow


def plan(name: str, rendered: Rendered, *, longest: int = 1000, **options: Any) -> PlannedRow:
    settings = PromptSettings.check(target="-", prompts="-", **options)
    row = PromptRow("a", "p.jsonl:1", (), rendered=rendered)
    return plan_row(row, renderer_for(name), settings, longest)


def as_text(text: str) -> Rendered:
    return Rendered(text, None, None)


def as_ids(ids: list[int], mask: list[int] | None = None) -> Rendered:
    return Rendered(None, tuple(ids), None if mask is None else tuple(mask))


NAMES = ["chatml", "llama3", "gemma", "qwen3", "mistral", "gemma4", "tools"]


@pytest.mark.parametrize("name", NAMES)
def test_the_templates_own_text_and_ids_are_taken_as_they_are(name: str) -> None:
    renderer = renderer_for(name)
    text = interleave(renderer.last_prompt(chat("q", "a", "r")).segments, ["a"])
    ids = renderer.encode(text).tolist()
    for rendered in (as_text(text), as_ids(ids)):
        for turns in ("all", "last"):
            assert plan(name, rendered, turns=turns) == PlannedRow([ids], None)


@pytest.mark.parametrize("name", NAMES)
def test_a_rendered_row_with_its_mask(name: str) -> None:
    renderer = renderer_for(name)
    ids, mask = renderer.given_row(chat("q", "a"))
    planned = plan(name, as_ids(ids.tolist(), mask.tolist()), turns="given")
    assert planned == PlannedRow([ids.tolist()], mask.tolist())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|turn>user\nq<turn|>\n<|turn>model\n", "bad_bos"),
        ("<bos><bos><|turn>user\nq<turn|>\n<|turn>model\n", "bad_bos"),
        ("<bos><|turn>user\nq<turn|>\n", "no_open_answer"),
        ("<bos><|turn>user\nq<turn|>\n<|turn>model\na<turn|>\n", "no_open_answer"),
        ("<bos>Once upon a time", "no_open_answer"),
    ],
)
def test_texts_that_do_not_ask(text: str, reason: str) -> None:
    """A1, A2, A25: one BOS, and the generation header at the end."""
    ids = renderer_for("gemma4").encode(text).tolist()
    for rendered in (as_text(text), as_ids(ids)):
        with pytest.raises(RowReject) as caught:
            plan("gemma4", rendered)
        assert caught.value.reason == reason


def test_an_answer_may_have_begun() -> None:
    text = "<bos><|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\n<channel|>Sure, "
    ids = plan("gemma4", as_text(text)).segments[0]
    assert text_of(renderer_for("gemma4"), ids) == text


def test_ids_outside_the_vocabulary_and_long_ones() -> None:
    renderer = renderer_for("chatml")
    ids = renderer.encode(renderer.prompt_segments(chat("q"))[0]).tolist()
    for rendered, longest, reason in [
        (as_ids([renderer.vocab_size, *ids]), 1000, "bad_token_ids"),
        (as_ids(ids), len(ids), "too_long"),
    ]:
        with pytest.raises(RowReject) as caught:
            plan("chatml", rendered, longest=longest)
        assert caught.value.reason == reason
    assert plan("chatml", as_ids(ids), longest=len(ids) + 1).segments == [ids]


@pytest.mark.parametrize("rendered", [as_text("x"), as_ids([1, 2]), as_ids([1, 2], [0, 0])])
def test_given_turns_need_a_mask(rendered: Rendered) -> None:
    """A18: a mask of zeros is no mask."""
    with pytest.raises(RowReject, match="no_assistant_turn"):
        plan("chatml", rendered, turns="given")
