"""Thoughts in the input: kept, dropped or given to the template, and supervised where printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import templates
from chats import byte_tokenizer, renderer_for, text_of

from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.errors import PipelineError, RowReject
from pipeline.planned_rows import template_args
from pipeline.prompts import PromptRow, RejectedRow, read_prompts

INLINE = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
APART = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
OTHER_NAME = {"role": "assistant", "content": "yes", "thinking": "hm"}
CHANNEL = {"role": "assistant", "content": "<|channel>thought\nhm\n<channel|>yes"}


def read(path: Path, answer: Any, thinking: Any, *more: Any) -> PromptRow | RejectedRow:
    turns = [{"role": "user", "content": "q"}, answer, *more]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return next(iter(read_prompts(str(path), thinking=thinking)))


def given(renderer: ChatRenderer, row: PromptRow | RejectedRow) -> tuple[str, str]:
    """The whole text, and what is supervised of it."""
    assert isinstance(row, PromptRow), row
    ids, mask = renderer.given_row(row.messages)
    return text_of(renderer, ids), text_of(renderer, ids[mask == 1])


@pytest.mark.parametrize(
    "answer", [INLINE, APART, {**APART, "reasoning_content": None, "thinking": "hm"}]
)
def test_a_thought_given_to_the_template_is_supervised_where_it_prints_it(
    tmp_path: Path, answer: Any
) -> None:
    row = read(tmp_path / "p.jsonl", answer, "template")
    text, learnt = given(renderer_for("tools", thinking="template"), row)
    assert learnt == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert text == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{learnt}\n"


def test_a_thought_that_the_header_opens_starts_after_it(tmp_path: Path) -> None:
    """A17: what the generation header prints is never supervised, nor printed twice."""
    renderer = renderer_for("tools", thinking="template", template_args={"open_thought": True})
    row = read(tmp_path / "p.jsonl", INLINE, "template")
    text, learnt = given(renderer, row)
    assert learnt == "hm\n</think>\n\nyes<|im_end|>"
    assert text.count("<think>") == 1
    assert isinstance(row, PromptRow)
    assert renderer.prompt_segments(row.messages)[0].endswith("assistant\n<think>\n")


def test_gemma4_drops_thoughts_of_earlier_turns(tmp_path: Path) -> None:
    renderer = renderer_for("gemma4", thinking="template")
    last = read(tmp_path / "p.jsonl", CHANNEL, "template")
    assert given(renderer, last)[1] == "<|channel>thought\nhm\n<channel|>yes<turn|>"
    more = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "no"}]
    earlier = read(tmp_path / "p.jsonl", CHANNEL, "template", *more)
    assert given(renderer, earlier)[1] == "yes<turn|>no<turn|>"
    # Kept, it must be printed.
    kept = read(tmp_path / "p.jsonl", APART, "keep", *more)
    assert isinstance(kept, PromptRow)
    with pytest.raises(RowReject, match=r"the thought of turn 1 .* is printed 0 times"):
        renderer_for("gemma4").given_row(kept.messages)


@pytest.mark.parametrize("answer", [INLINE, APART, CHANNEL])
def test_dropped_thoughts_are_gone(tmp_path: Path, answer: Any) -> None:
    for name, end in (("tools", "<|im_end|>"), ("gemma4", "<turn|>"), ("chatml", "<|im_end|>")):
        row = read(tmp_path / "p.jsonl", answer, "drop")
        text, learnt = given(renderer_for(name), row)
        assert learnt == f"yes{end}" and "hm" not in text


def test_kept_thoughts_stay_as_they_are_or_the_row_goes(tmp_path: Path) -> None:
    plain = ChatRenderer(byte_tokenizer(templates.CHATML, eos="<|im_end|>"))
    row = read(tmp_path / "p.jsonl", INLINE, "keep")
    assert given(plain, row)[1] == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    apart = read(tmp_path / "p.jsonl", APART, "keep")
    assert isinstance(apart, PromptRow)
    with pytest.raises(RowReject, match="template_drops_text"):
        plain.given_row(apart.messages)
    # Answered anew, the answer and its thought do not matter.
    assert len(Conversation.all_turns(plain, apart.messages).segments) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"role": "assistant", "content": "<think>only</think> "}, "empty_content"),
        ({**INLINE, "reasoning": "other"}, "bad_turn"),
        ({**APART, "reasoning_content": ["x"]}, "bad_content"),
        ({**APART, "reasoning_content": "\ud83d"}, "lone_surrogate"),
    ],
)
def test_thoughts_that_cannot_be_told_apart(tmp_path: Path, answer: Any, reason: str) -> None:
    row = read(tmp_path / "p.jsonl", answer, "template")
    assert isinstance(row, RejectedRow) and row.reason == reason


@pytest.mark.parametrize(
    ("switch", "system", "expected"),
    [
        (None, False, "<bos><|turn>user\nq<turn|>\n<|turn>model\n"),
        (
            True,
            False,
            "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n",
        ),
        (
            False,
            True,
            "<bos><|turn>system\nS<turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n"
            "<|channel>thought\n<channel|>",
        ),
    ],
)
def test_the_thinking_switch_is_the_templates_own(
    switch: bool | None, system: bool, expected: str, tmp_path: Path
) -> None:
    """A15: never set by guesswork, and rendered as the template says."""
    args = [] if switch is None else [f"enable_thinking={json.dumps(switch)}"]
    renderer = renderer_for("gemma4", template_args=template_args(args))
    row = {"prompt": "q", **({"system": "S"} if system else {})}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    found = next(iter(read_prompts(str(tmp_path / "p.jsonl"))))
    assert isinstance(found, PromptRow)
    assert renderer.prompt_segments(found.messages) == [expected]


def test_template_args() -> None:
    found = template_args(
        ["enable_thinking=false", "date_string=26 Jul 2024", "n=3", 't="3"', "e="]
    )
    expected = {"enable_thinking": False, "date_string": "26 Jul 2024", "n": 3, "t": "3", "e": ""}
    assert found == expected
    for bad, message in [
        (["x"], "must be NAME=VALUE"),
        (["a-b=1"], "must be NAME=VALUE"),
        (["a=1", "a=2"], "a is given already"),
        (["tools=[]"], "tools is given already"),
    ]:
        with pytest.raises(PipelineError, match=message):
            template_args(bad)
