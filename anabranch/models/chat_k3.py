"""Kimi-K3's chat format ("XTML") as a list of pieces, each of which is encoded on its own.

Markers are special ids; tag names, attributes and everything a user wrote are plain text, so no text can add structure.
Source: Kimi-K3 released tokenizer code (it ships no Jinja template), whose ids this rendering reproduces.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

EFFORTS = ("low", "high", "max")
DEFAULT_EFFORT = "max"
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (_OPEN, _CLOSE, _SEP, _END)

# The wording is the model's training format: not ours to change ("medium" is named in it and yet not accepted).
_EFFORT_NOTE = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS_NOTE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_CHOICE_NOTES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT_NOTE = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA_NOTE = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Piece(NamedTuple):
    """Text to encode on its own: as one special token (`marker`) or as plain text."""

    text: str
    marker: bool = False


def render_pieces(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    thinking: bool,
    effort: str | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
) -> list[Piece]:
    """The conversation as pieces, without empty ones.

    `messages` are checked ones: a known role, `content` None or a sequence of strings (one piece each). `effort` (None:
    "max", as the released tokenizer has it) matters only while thinking. ValueError in one line: unknown effort, tool
    choice or response format; a tool call or a tool result that cannot be written.
    """
    choice, body_format = _check_options(effort, tool_choice, response_format, bool(tools))
    pieces: list[Piece] = []
    if tools:
        pieces += _note("tool-declare", _TOOLS_NOTE.format(_compact(tools)))
    if thinking:
        pieces += _note("thinking-effort", _EFFORT_NOTE.format(effort or DEFAULT_EFFORT))
    pieces += _conversation(messages, thinking)
    if choice in _CHOICE_NOTES:
        pieces += _note("tool-choice", _CHOICE_NOTES[choice])
    if body_format:
        pieces += _note("response-format", body_format)
    if add_generation_prompt:
        pieces += _open("message", [("role", "assistant")]) + _open("think" if thinking else "response")
    return [piece for piece in pieces if piece.text]


def _check_options(
    effort: str | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    has_tools: bool,
) -> tuple[str, str]:
    """(tool choice, body of the response-format note), checked."""
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"unknown thinking_effort {effort!r}; accepted: {', '.join(EFFORTS)}")
    choice = "auto" if tool_choice is None else tool_choice
    if not isinstance(choice, str) or choice not in TOOL_CHOICES:
        raise ValueError(f"unknown tool_choice {choice!r}; accepted: {', '.join(TOOL_CHOICES)}")
    if choice == "required" and not has_tools:
        raise ValueError("tool_choice 'required' needs tools")
    # without tools there is nothing to forbid, and "none" is then the default of OpenAI clients
    choice = choice if has_tools else "auto"
    kind = "text" if response_format is None else response_format.get("type")
    if kind not in RESPONSE_FORMATS:
        raise ValueError(f"unknown response_format type {kind!r}; accepted: {', '.join(RESPONSE_FORMATS)}")
    if response_format is None or kind == "text":
        return choice, ""
    if kind == "json_object":
        return choice, _FORMAT_NOTE.format(kind)
    wrapper = response_format.get("json_schema")
    if not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("schema"), Mapping):
        raise ValueError("response_format json_schema needs an object json_schema.schema")
    return choice, _FORMAT_NOTE.format(kind) + _SCHEMA_NOTE.format(_compact(wrapper["schema"]))


def _conversation(messages: Sequence[Mapping[str, Any]], thinking: bool) -> list[Piece]:
    pieces: list[Piece] = []
    calls: Sequence[Any] = ()
    results = 0
    for message in _in_call_order(messages):
        if message["role"] == "assistant":
            calls, results = message.get("tool_calls") or (), 0
            pieces += _message([("role", "assistant"), *_name(message)], _assistant(message, thinking))
        elif message["role"] == "tool":
            tool = _tool_name(message, calls, results)
            results += 1
            pieces += _message([("role", "tool"), ("tool", tool), ("index", str(results))], _text(message["content"]))
        else:
            pieces += _message([("role", message["role"]), *_name(message)], _text(message["content"]))
    return pieces


def _open(tag: str, attributes: Sequence[tuple[str, str]] = ()) -> list[Piece]:
    pieces = [Piece(_OPEN, True), Piece(tag)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        # four pieces, not one: BPE must not join the quotes with the value
        pieces += [Piece(f" {key}"), Piece('="'), Piece(escaped), Piece('"')]
    return [*pieces, Piece(_SEP, True)]


def _close(tag: str) -> list[Piece]:
    return [Piece(_CLOSE, True), Piece(tag), Piece(_SEP, True)]


def _element(tag: str, attributes: Sequence[tuple[str, str]], content: Sequence[Piece]) -> list[Piece]:
    return [*_open(tag, attributes), *content, *_close(tag)]


def _message(attributes: Sequence[tuple[str, str]], content: Sequence[Piece]) -> list[Piece]:
    return [*_element("message", attributes, content), Piece(_END, True)]


def _note(kind: str, body: str) -> list[Piece]:
    return _message([("role", "system"), ("type", kind)], [Piece(body)])


def _text(content: Sequence[str] | None) -> list[Piece]:
    return [Piece(part) for part in content or ()]


def _name(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("name", str(message["name"]))] if message.get("name") else []


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _assistant(message: Mapping[str, Any], thinking: bool) -> list[Piece]:
    """The channels of an assistant turn; the think channel is there, if empty, in every turn of a thinking chat."""
    pieces: list[Piece] = []
    if thinking:
        reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
        pieces += _element("think", (), [Piece(reasoning)] if reasoning.strip() else [])
    pieces += _element("response", (), _text(message["content"]))
    calls = message.get("tool_calls") or ()
    if calls:
        inside = [piece for index, call in enumerate(calls, start=1) for piece in _call(call, index)]
        pieces += _element("tools", (), inside)
    return pieces


def _call(call: Mapping[str, Any], index: int) -> list[Piece]:
    function = call["function"]
    content: list[Piece] = []
    arguments = _arguments(function.get("arguments"), function["name"])
    if isinstance(arguments, str):
        content += _element("json", [("type", "object")], [Piece(arguments)])
    else:
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            content += _element("argument", [("key", key), ("type", _type(value))], [Piece(text)])
    return _element("call", [("tool", function["name"]), ("index", str(index))], content)


def _arguments(arguments: object, tool: str) -> Mapping[str, Any] | str:
    """Arguments as an object; a string that is not JSON (a model's own slip) stays a string."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            return arguments
    if not isinstance(parsed, Mapping):
        raise ValueError(f"arguments of the call of {tool!r} must be a JSON object, not {type(parsed).__name__}")
    return parsed


def _type(value: object) -> str:
    # bool before int, which it is one of
    names = ((type(None), "null"), (bool, "boolean"), ((int, float), "number"), (str, "string"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "array")


def _tool_name(message: Mapping[str, Any], calls: Sequence[Any], position: int) -> str:
    name = message.get("tool") or message.get("name")
    if name is None and position < len(calls):
        name = calls[position]["function"]["name"]
    if name is None:
        raise ValueError("a tool message needs a name, or a tool call that it answers")
    return str(name)


def _in_call_order(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with each run of tool results in the order of the calls, and named after them.

    A run in which any `tool_call_id` is unknown keeps its order and its names.
    """
    ordered: list[Mapping[str, Any]] = []
    calls: dict[str, tuple[int, str]] = {}
    for is_tool, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        run = list(group)
        ids = [str(message.get("tool_call_id")) for message in run]
        if is_tool and calls.keys() >= set(ids):
            order = sorted(range(len(run)), key=lambda position: calls[ids[position]][0])
            run = [{**run[position], "tool": calls[ids[position]][1]} for position in order]
        ordered += run
        for message in run:
            if message["role"] == "assistant":
                calls = _call_positions(message.get("tool_calls") or ())
    return ordered


def _call_positions(calls: Sequence[Any]) -> dict[str, tuple[int, str]]:
    """Id -> (position, tool name); the first call wins where an id is used twice."""
    positions: dict[str, tuple[int, str]] = {}
    for position, call in enumerate(calls):
        if call.get("id") is not None:
            positions.setdefault(str(call["id"]), (position, call["function"]["name"]))
    return positions
