"""Tools that a client offers: checked, and shown to the model. If the client demands a call, a grammar ensures it.

`chat.tool_calls` reads the calls in an answer. A template that knows nothing of tools gets them spelt out in the system
message, in the way most models have seen (Hermes): a client's tools are never dropped silently.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.chat.tool_calls import CLOSE, OPEN, ToolCallParser
from paceline.errors import InvalidRequest
from paceline.types import Grammar

MAX_TOOLS = 128  # tools of one request
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

INSTRUCTIONS = f"""You may call functions to help with the user's request. They are given within <tools></tools>:
<tools>
{{tools}}
</tools>
For each call, answer with a JSON object of its name and arguments within {OPEN}{CLOSE}:
{OPEN}
{{{{"name": <function-name>, "arguments": <arguments-json-object>}}}}
{CLOSE}"""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a request. `choice` is auto, required, or the name of the one tool to be called."""

    functions: Mapping[str, Mapping[str, Any]]  # by name
    choice: str = "auto"

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of an answer that must be a call, {"name": …, "arguments": …}; None: it need not be one."""
        if not self.forced:
            return None
        names = list(self.functions) if self.choice == "required" else [self.choice]
        places = {name: f"tool{i}" for i, name in enumerate(names)}
        calls = [_call_schema(name, f"#/$defs/{place}") for name, place in places.items()]
        parameters = {place: _moved(_parameters(self.functions[n]), f"#/$defs/{place}") for n, place in places.items()}
        return Grammar.json_schema({**({"anyOf": calls} if len(calls) > 1 else calls[0]), "$defs": parameters})

    def parser(self) -> ToolCallParser:
        """Make a parser for one answer."""
        return ToolCallParser(self.functions, forced=self.forced)

    def place(self, messages: Sequence[Message], template: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Return the messages and tools to render. A template without the word `tools` gets them in its messages."""
        listed = [{"type": "function", "function": dict(function)} for function in self.functions.values()]
        if re.search(r"\btools\b", template):
            return list(messages), listed
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in listed)
        return _with_instructions(spelt_out(messages), INSTRUCTIONS.format(tools=lines)), None


def read_tools(tools: Any, choice: Any = None) -> Tools | None:
    """Read `tools` and `tool_choice` of a request; None: the answer is plain text."""
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice demands a call, and there are no tools: send some", param="tool_choice")
        return None
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools must be a list, not {type(tools).__name__}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools were given; at most {MAX_TOOLS} are allowed", param="tools")
    functions: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = _function(tool, f"tools[{i}]")
        if function["name"] in functions:
            raise InvalidRequest(
                f"two tools are named {function['name']!r}; each needs a name of its own", param="tools"
            )
        functions[function["name"]] = function
    chosen = _choice(choice, functions)
    return None if chosen == "none" else Tools(functions, chosen)


def spelt_out(messages: Sequence[Message]) -> list[Message]:
    """Write calls and their results as text, for templates that would leave them out."""
    return [_spelt_out(message) for message in messages]


def _spelt_out(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    blocks = [f"{OPEN}\n{_as_json(call)}\n{CLOSE}" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [_text(message)]), *blocks])}


def _as_json(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            "a tool call of a message must have a function with a name and arguments", param="messages"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are no JSON stay a text
            arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{_text(first)}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    """Read the function of a tool: wrapped, as in the chat API, or bare, as in the responses API."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise InvalidRequest(f"{where} must be an object of type 'function', not {kind!r:.60}", param="tools")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object, not {type(function).__name__}", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where} is named {name!r:.80}; a name has 1 to 64 letters, digits, _, . and -", param="tools"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"the parameters of {where} must be a JSON schema, not {type(parameters).__name__}", param="tools"
        )
    known = ("name", "description", "parameters", "strict")
    return {key: function[key] for key in known if function.get(key) is not None}


def _choice(choice: Any, functions: Mapping[str, Any]) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f"tool_choice must be auto, none, required or name a function, not {choice!r:.100}", param="tool_choice"
        )
    if name not in functions:
        raise InvalidRequest(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return name


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or _NO_PARAMETERS


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": {"$ref": parameters}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Move a schema into a larger document, to `place`: references to itself follow."""
    if isinstance(schema, Mapping):
        return {key: _reference(key, value, place) or _moved(value, place) for key, value in schema.items()}
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


def _reference(key: str, value: Any, place: str) -> str | None:
    own = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
    return f"{place}{value[1:]}" if own else None
