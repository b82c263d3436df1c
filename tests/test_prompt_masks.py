"""Random conversations in every format: what is supervised is the answers, and nothing else."""

import json
from typing import Any

import numpy as np
import templates
from chats import renderer_for, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import RowReject
from pipeline.planned_rows import plan_row
from pipeline.prompt_json import parse_object
from pipeline.prompt_settings import PromptSettings
from pipeline.prompt_turns import read_chat
from pipeline.prompts import PromptRow

TEXT = st.text(
    st.one_of(st.sampled_from("ab \n\t.{}\"'日😀"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=10,
).filter(str.strip)
# A word of its own never joins the markup around it.
WORD = TEXT.map(lambda text: f"a{text}z")
KEY = st.sampled_from(["city", "days", "q"])
ARGUMENTS = st.dictionaries(KEY, st.one_of(WORD, st.integers(-9, 9), st.booleans()), max_size=2)
RENDERERS = {name: renderer_for(name, thinking="template") for name in templates.ALL}
STRIPPING = ("llama3", "gemma", "gemma4")


@st.composite
def conversations(draw: Any) -> tuple[str, dict[str, Any], list[str], list[str]]:
    """A template's name, a row, its answers, and its answers' thoughts ("" for none)."""
    name = draw(st.sampled_from(sorted(templates.ALL)))
    form = draw(st.sampled_from(["messages", "conversations", "parts", "prompt", "instruction"]))
    count = 1 if form in ("prompt", "instruction") else draw(st.integers(1, 3))
    questions = [draw(WORD) for _ in range(count)]
    answers = [draw(WORD) for _ in range(count)]
    system = draw(st.one_of(st.none(), WORD))
    row: dict[str, Any] = {} if system is None else {"system": system}
    thoughts = [""] * count
    if form == "prompt":
        row |= {
            "prompt": questions[0],
            draw(st.sampled_from(["completion", "response"])): answers[0],
        }
    elif form == "instruction":
        row |= {"instruction": questions[0], "output": answers[0]}
        if draw(st.booleans()):
            row["input"] = draw(WORD)
    elif form == "conversations":
        row["conversations"] = [
            turn
            for question, answer in zip(questions, answers, strict=True)
            for turn in ({"from": "human", "value": question}, {"from": "gpt", "value": answer})
        ]
    else:
        row["messages"] = []
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            row["messages"].append({"role": "user", "content": question})
            if name in ("tools", "gemma4") and draw(st.booleans()):
                row["messages"] += draw(calls())
            content: Any = answer
            if form == "parts":
                cut = draw(st.integers(0, len(answer)))
                content = [{"type": "text", "text": part} for part in (answer[:cut], answer[cut:])]
            turn = {"role": "assistant", "content": content}
            if name in ("tools", "gemma4") and draw(st.booleans()):
                thoughts[i] = turn["reasoning_content"] = draw(WORD)
            row["messages"].append(turn)
    return name, row, answers, thoughts


@st.composite
def calls(draw: Any) -> list[dict[str, Any]]:
    arguments = draw(ARGUMENTS)
    call = {
        "name": draw(WORD),
        "arguments": draw(st.sampled_from([arguments, json.dumps(arguments)])),
    }
    results = [{"role": "tool", "content": draw(WORD)} for _ in range(draw(st.integers(1, 2)))]
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, *results]


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_the_supervised_ids_decode_to_the_answers_and_their_ends(
    example: tuple[str, dict[str, Any], list[str], list[str]],
) -> None:
    name, row, answers, thoughts = example
    renderer = RENDERERS[name]
    chat = read_chat(parse_object(json.dumps(row).encode()), "template")
    prompt = PromptRow("a", "p.jsonl:1", *chat)
    options = {"target": "-", "prompts": "-", "thinking": "template"}
    try:
        planned = plan_row(
            prompt, renderer, PromptSettings.check(turns="given", **options), longest=100_000
        )
    except RowReject as reject:
        assert reject.reason == "control_token", reject  # hypothesis finds them in our sources
        return
    ids, mask = np.array(planned.segments[0]), np.array(planned.given_mask)
    end = templates.END_OF_TURN[name]
    expected = []
    for i, (answer, thought) in enumerate(zip(answers, thoughts, strict=True)):
        printed = thought if name == "tools" or i == len(answers) - 1 else ""
        opening, closing = (
            ("<think>\n", "\n</think>\n\n")
            if name == "tools"
            else ("<|channel>thought\n", "\n<channel|>")
        )
        expected.append((f"{opening}{printed}{closing}" if printed else "") + answer + end)
    assert text_of(renderer, ids[mask == 1]) == "".join(expected)
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    assert len(starts) == len(answers)
    # Answering only the last question, everything else is context, and one answer is open.
    asked = PromptSettings.check(turns="last", **options)
    last = plan_row(prompt, renderer, asked, longest=100_000)
    assert len(last.segments) == 1 and last.given_mask is None
