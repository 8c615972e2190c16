"""Messages of a chat: checked, and brought into the one shape that chat templates know.

Nothing here knows of templates or tokens. The result is JSON-like and owned by the caller: text parts are joined to one
string, and arguments of tool calls are objects rather than JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import check_text
from paceline.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_DEPTH = 64  # levels of values inside values

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a non-empty list of objects with a role and content")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools must be a list of objects, not {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"tools[{i}] must be an object that describes a function, not {type(tool).__name__}")
    return [dict(tool) for tool in tools] or None


def check_json(value: Any, where: str, depth: int = 0) -> Any:
    """Copy a JSON-like value. Raises InvalidRequest for anything else in it."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_text(value, where)
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            _key(key, where): check_json(item, f"{where}.{key}" if depth < 4 else where, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [check_json(item, f"{where}[{i}]" if depth < 4 else where, depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}; allowed are JSON values")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequest(f"{where} has the key {key!r:.40}; keys must be strings")
    check_text(key, f"a key of {where}")
    return key


def _message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with a role and content, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {role!r:.60}; allowed are {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}  # templates ask `"name" in message`
    checked["content"] = _content(message, f"{where}.content")
    calls = checked.pop("tool_calls", [])
    if calls != []:
        checked["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return checked


def _content(message: Message, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") == "assistant" and isinstance(message.get("refusal"), str):
        return str(message["refusal"])
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, list | tuple) and content:
        refuses = message.get("role") == "assistant"
        return "\n".join(_text_part(part, f"{where}[{i}]", refuses=refuses) for i, part in enumerate(content))
    given = "missing" if content is None else f"{content!r:.60}"
    raise InvalidRequest(f"{where} is {given}; it must be a string or a list of text parts")


def _text_part(part: Any, where: str, *, refuses: bool) -> str:
    """Read the text of a part. `refuses`: it may be a refusal, which only an assistant says."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" and not (refuses and kind == "refusal"):
        raise InvalidRequest(
            f"{where} is of type {kind!r:.60}; this model reads text only: {{'type': 'text', 'text': ...}}"
        )
    if not isinstance(part.get(kind), str):
        raise InvalidRequest(f"{where}.{kind} must be a string, not {type(part.get(kind)).__name__}")
    text: str = part[kind]
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{where} must be a list of objects, not {calls!r:.60}")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must be an object with a name and arguments")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """Parse arguments that a client sent as JSON text, since templates write JSON themselves."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
