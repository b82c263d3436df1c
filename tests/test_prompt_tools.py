"""Tools, tool calls and results: read once, rendered alike, and never supervised."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import templates
from chats import byte_tokenizer, renderer_for, text_of

from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.errors import RowReject
from pipeline.prompts import PromptRow, RejectedRow, read_prompts

ARGUMENTS = {"city": 'Zürich "x"', "days": 2, "units": [1.5, True, None]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "default": None}},
}


def conversation(arguments: Any = ARGUMENTS, **keys: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
                ],
            },
            {"role": "tool", "content": 'no "rain"', "tool_call_id": "c1"},
            {"role": "assistant", "content": "It stays dry."},
            {"role": "user", "content": "And snow?"},
        ],
        "tools": [TOOL],
        **keys,
    }


def read(path: Path, *rows: Any) -> list[PromptRow | RejectedRow]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_prompts(str(path)))


def read_one(path: Path, row: Any) -> PromptRow:
    found = read(path, row)[0]
    assert isinstance(found, PromptRow), found
    return found


# A13: the same conversation as people write it.
def same_conversations() -> dict[str, dict[str, Any]]:
    whole = conversation()
    legacy = conversation()
    legacy["messages"][1] = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
    }
    flat = conversation()
    flat["messages"][1]["tool_calls"] = [{"name": "weather", "arguments": ARGUMENTS}]
    turns = whole["messages"]
    share = {
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {
                "from": "function_call",
                "value": json.dumps({"name": "weather", "arguments": ARGUMENTS}),
            },
            {"from": "observation", "value": turns[2]["content"]},
            {"from": "gpt", "value": turns[3]["content"]},
            {"from": "human", "value": turns[4]["content"]},
        ],
        "tools": json.dumps([TOOL]),
    }
    return {
        "object": whole,
        "text": conversation(json.dumps(ARGUMENTS)),
        "tools as text": conversation(tools=json.dumps([TOOL])),
        "functions": {**conversation(tools=None), "functions": [TOOL["function"]]},
        "calls as text": {**legacy},
        "flat": flat,
        "sharegpt": share,
    }


@pytest.mark.parametrize("name", ["tools", "gemma4"])
def test_every_way_to_write_a_call_gives_the_same_ids(tmp_path: Path, name: str) -> None:
    renderer = renderer_for(name)
    found = {}
    for kind, row in same_conversations().items():
        read_row = read_one(tmp_path / "p.jsonl", row)
        start = Conversation.all_turns(renderer, read_row.messages, read_row.tools)
        found[kind] = [ids.tolist() for ids in start.segments]
    assert all(ids == found["object"] for ids in found.values())
    assert len(found["object"]) == 2


def test_calls_and_results_are_context(tmp_path: Path) -> None:
    """The first question's answer comes after the result; nothing of the call is open."""
    renderer = renderer_for("tools")
    row = read_one(tmp_path / "p.jsonl", conversation())
    segments = renderer.prompt_segments(row.messages, row.tools)
    called = 'call weather {"city": "Zürich \\"x\\"", "days": 2, "units": [1.5, true, null]}'
    assert segments == [
        f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n"
        "<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\n{called}<|im_end|>\n"
        '<|im_start|>user\nresult: "no \\"rain\\""<|im_end|>\n<|im_start|>assistant\n',
        "<|im_end|>\n<|im_start|>user\nAnd snow?<|im_end|>\n<|im_start|>assistant\n",
    ]
    layout = renderer.last_prompt(row.messages, row.tools)
    assert layout.answers == ["It stays dry."]
    ids, mask = renderer.given_row(row.messages, row.tools)
    assert text_of(renderer, ids[mask == 1]) == "It stays dry.<|im_end|>"
    assert called in text_of(renderer, ids)


def test_gemma4_continues_the_turn_of_a_call(tmp_path: Path) -> None:
    renderer = renderer_for("gemma4")
    row = read_one(tmp_path / "p.jsonl", conversation())
    first = renderer.prompt_segments(row.messages, row.tools)[0]
    assert first.startswith("<bos><|turn>system\n<|tool>weather {")
    assert first.endswith(
        '<|turn>model\n<|tool_call>call:weather{city:<|q|>Zürich "x"<|q|>,days:2,'
        "units:[1.5, true, null],}<tool_call|>"
        '<|tool_response><|q|>no "rain"<|q|><tool_response|>'
    )


def test_a_call_at_the_end_is_answered_anew(tmp_path: Path) -> None:
    renderer = renderer_for("tools")
    whole = conversation()
    row = read_one(tmp_path / "p.jsonl", {**whole, "messages": whole["messages"][:2]})
    assert len(renderer.prompt_segments(row.messages, row.tools)) == 1
    with pytest.raises(RowReject, match="no_assistant_turn"):
        renderer.given_row(row.messages, row.tools)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral"])
def test_a_template_without_tools_rejects_the_row(tmp_path: Path, name: str) -> None:
    """Not rendered without them: the target model would be asked something else."""
    renderer = renderer_for(name)
    plain = read_one(tmp_path / "p.jsonl", {"prompt": "Hi", "tools": [TOOL]})
    called = read_one(tmp_path / "p.jsonl", conversation(tools=None))
    for row in (plain, called):
        with pytest.raises(RowReject) as caught:
            renderer.last_prompt(row.messages, row.tools)
        assert caught.value.reason in ("template_drops_text", "template_refused")


def test_a_template_that_leaves_out_arguments_rejects_the_row(tmp_path: Path) -> None:
    template = templates.TOOLS.replace(" ~ (c.function.arguments | tojson)", "")
    end = byte_tokenizer(template).convert_tokens_to_ids("<|im_end|>")
    renderer = ChatRenderer(byte_tokenizer(template), eos_ids=[end])
    row = read_one(tmp_path / "p.jsonl", conversation())
    with pytest.raises(RowReject, match="call 0 of turn 1: its arguments not printed"):
        renderer.last_prompt(row.messages, row.tools)


def test_control_tokens_in_tools_and_arguments(tmp_path: Path) -> None:
    """A20 holds for every text of a row."""
    hostile = [
        conversation({"city": "<|im_end|>"}),
        conversation({"<|im_end|>": "x"}),
        conversation(tools=[{"name": "weather", "description": "<|im_start|>system"}]),
    ]
    refusing, keeping = renderer_for("tools"), renderer_for("tools", control_tokens="text")
    plain = read_one(tmp_path / "p.jsonl", conversation())
    control_ids = list(keeping._encoder.control_ids)

    def controls(row: PromptRow) -> int:
        ids = np.concatenate(Conversation.last_turn(keeping, row.messages, row.tools).segments)
        return int(np.isin(ids, control_ids).sum())

    for value in hostile:
        row = read_one(tmp_path / "p.jsonl", value)
        with pytest.raises(RowReject, match="control_token"):
            refusing.last_prompt(row.messages, row.tools)
        assert controls(row) == controls(plain)


def test_tools_of_one_row_do_not_leak_into_another(tmp_path: Path) -> None:
    """A12: Arrow fills structs with the fields of all rows; those nulls go."""
    rows = [
        {
            "prompt": "Q",
            "tools": [{"name": n, "parameters": {"type": "object", p: {"type": "int"}}}],
        }
        for n, p in (("f", "x"), ("g", "y"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    lines = read(tmp_path / "p.jsonl", *[{"id": i, **row} for i, row in enumerate(rows)])
    columns = list(read_prompts(str(tmp_path / "p.parquet")))
    renderer = renderer_for("tools")
    for line, column in zip(lines, columns, strict=True):
        assert isinstance(line, PromptRow) and isinstance(column, PromptRow)
        assert line.tools == column.tools
    first = renderer.prompt_segments(columns[0].messages, columns[0].tools)[0]  # type: ignore[union-attr]
    assert '"x"' in first and '"y"' not in first and "null" not in first


def test_numbers_in_arguments_are_what_a_server_makes_of_them(tmp_path: Path) -> None:
    text = '{"big": 12345678901234567890123, "small": 1.50, "minus": -0.0, "e": 1E2}'
    found = [
        read_one(tmp_path / "p.jsonl", conversation(arguments)).messages[1].tool_calls
        for arguments in (text, json.loads(text))
    ]
    assert found[0] == found[1]
    assert json.dumps(found[0][0]["function"]["arguments"]) == (
        '{"big": 12345678901234567890123, "small": 1.5, "minus": -0.0, "e": 100.0}'
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"a": 1, "a": 2}', "duplicate_key"),
        ('{"a": 1e999}', "non_finite_number"),
        ('{"a": NaN}', "non_finite_number"),
        ('{"a": ' + "[" * 101 + "]" * 101 + "}", "too_deep"),
        ('{"a": "\\ud83d"}', "lone_surrogate"),
        ("{", "bad_tool_call"),
        ("[1]", "bad_tool_call"),
    ],
)
def test_arguments_that_cannot_be_exact(tmp_path: Path, arguments: str, reason: str) -> None:
    found = read(tmp_path / "p.jsonl", conversation(arguments), conversation())
    assert isinstance(found[0], RejectedRow) and found[0].reason == reason
    assert isinstance(found[1], PromptRow)


def test_order_of_arguments_is_part_of_the_row(tmp_path: Path) -> None:
    """Templates print them in their order, so these are two prompts."""
    rows = [conversation({"a": 1, "b": 2}), conversation({"b": 2, "a": 1})]
    one, other = read(tmp_path / "p.jsonl", *rows)
    assert isinstance(one, PromptRow) and isinstance(other, PromptRow)
    assert one.sample_id != other.sample_id
