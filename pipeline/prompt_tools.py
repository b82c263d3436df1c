"""Tool definitions and tool calls of a row, as chat templates expect them.

Arguments are decoded once, whether they came as an object or as its JSON text, so both give the
same ids. Numbers become what a server's JSON reader makes of them.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import RowReject
from pipeline.prompt_json import parse_json
from pipeline.prompt_rows import TOOL_KEYS, NumberText, quote


def read_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The row's `tools` (or `functions`), a list or its JSON text; each as {type, function}.

    Raises RowReject: bad_tool, both_conventions and what JSON can be rejected for.
    """
    given = [key for key in TOOL_KEYS if row.get(key)]
    if len(given) > 1:
        raise RowReject("both_conventions", f"give one of {' and '.join(given)}")
    if not given:
        return ()
    key = given[0]
    tools = _decoded(row[key], key, "bad_tool")
    if not isinstance(tools, list):
        raise RowReject("bad_tool", f"{key} must be a list, not {type(tools).__name__}")
    return tuple(_tool(tool, f"{key}[{i}]") for i, tool in enumerate(tools))


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RowReject("bad_tool", f"{where} must be an object, not {type(tool).__name__}")
    function = _function(tool)
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RowReject("bad_tool", f"{where} has no name")
    if function is not tool:
        return tool
    return {"type": "function", "function": tool}


def _function(value: dict[str, Any]) -> dict[str, Any]:
    """What a tool or call is wrapped around; itself if it is not wrapped."""
    inner = value.get("function")
    return inner if isinstance(inner, dict) else value


def read_calls(turn: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """A turn's `tool_calls`, or its one `function_call`.

    Raises RowReject: bad_tool_call and what JSON can be rejected for.
    """
    calls = turn.get("tool_calls") or []
    if turn.get("function_call"):
        if calls:
            raise RowReject("bad_turn", f"{where} has both tool_calls and function_call")
        calls = [turn["function_call"]]
    calls = _decoded(calls, where, "bad_tool_call")
    if not isinstance(calls, list):
        raise RowReject("bad_tool_call", f"the tool_calls of {where} are no list")
    return tuple(_call(call, f"{where} call {i}") for i, call in enumerate(calls))


def read_call_text(content: object, where: str) -> tuple[dict[str, Any], ...]:
    """The calls of a ShareGPT `function_call` turn, whose value is one call or a list of them."""
    calls = _decoded(content, where, "bad_tool_call")
    return read_calls({"tool_calls": calls if isinstance(calls, list) else [calls]}, where)


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RowReject("bad_tool_call", f"{where} must be an object, not {type(call).__name__}")
    function = _function(call)
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RowReject("bad_tool_call", f"{where} has no name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = _decoded(arguments, where, "bad_tool_call")
    if not isinstance(arguments, dict):
        raise RowReject("bad_tool_call", f"the arguments of {where} are no object")
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _decoded(value: object, where: str, reason: str) -> Any:
    """A JSON value, decoded if it is text, with true numbers and valid Unicode in it."""
    if isinstance(value, str) and not isinstance(value, NumberText):
        try:
            value = parse_json(value, f"in {where}")
        except json.JSONDecodeError as error:
            raise RowReject(reason, f"{where} is text but no JSON: {error.msg}") from None
    return _with_numbers(value, where)


def _with_numbers(value: Any, where: str) -> Any:
    if isinstance(value, NumberText):
        try:
            number = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:  # more digits than Python converts
            number = math.inf
        if isinstance(number, float) and not math.isfinite(number):
            raise RowReject("non_finite_number", f"{where} has the number {quote(value)}")
        return number
    if isinstance(value, str):
        check_unicode(value, where)
        return value
    if isinstance(value, list):
        return [_with_numbers(item, where) for item in value]
    if isinstance(value, dict):
        for key in value:
            check_unicode(key, where)
        return {key: _with_numbers(item, where) for key, item in value.items()}
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise RowReject("bad_tool_call", f"{where} holds a {type(value).__name__}, which JSON has not")


def check_unicode(text: str, where: str) -> None:
    """Raise RowReject lone_surrogate if the text cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"{where} has {quote(text[error.start])} alone at character {error.start}"
        raise RowReject("lone_surrogate", detail) from None
