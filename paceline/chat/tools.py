"""Tools that a client offers: checked, and shown to the model. A grammar ensures what the client demands of calls.

    choice           other demands                                      the answer
    required, a name                                                    one call
    auto             a form (`response_format`)                         calls, or the form
    auto             `strict`, no parallel calls, or not every tool     text with calls; their arguments fit
    auto             none                                               any text (no grammar)

`chat.tool_calls` reads the calls in an answer. A template that knows nothing of tools gets them spelt out in the system
message, in the way most models have seen (Hermes): a client's tools are never dropped silently.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from paceline.chat.tool_calls import CLOSE, OPEN, ToolCallParser
from paceline.errors import InvalidRequest
from paceline.sampling.schema_rewrites import closed
from paceline.types import Grammar

MAX_TOOLS = 128  # tools of one request
CHOICES = ("auto", "none", "required")
KEYS = ("arguments", "parameters")  # names under which models write the arguments of a bare call
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

    functions: Mapping[str, Mapping[str, Any]]  # by name; the model sees all of them
    choice: str = "auto"
    callable: tuple[str, ...] = ()  # names of those that may be called
    parallel: bool = True  # several calls in one answer are allowed
    marked: bool = True  # the model writes calls between markers, otherwise bare; see `written_by`
    form: Grammar | None = None  # grammar of an answer that is no call; None: any text

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def constrained(self) -> bool:
        """True if a grammar shapes the answer."""
        held = any(self.functions[name].get("strict") for name in self.callable)
        fewer = len(self.callable) < len(self.functions)
        return self.forced or self.form is not None or held or fewer or not self.parallel

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer. None: any text."""
        if not self.constrained:
            return None
        schemas = {name: _identified(name, _parameters(self.functions[name])) for name in self.callable}
        keys = KEYS[:1] if self.marked or self.forced else KEYS
        calls = [_call_schema(name, key, schema["$id"]) for name, schema in schemas.items() for key in keys]
        if self.forced:
            return _bundle(calls, schemas)
        if self.marked or self.form is None or not self.form.kind.startswith("json"):
            marks = (OPEN, CLOSE) if self.marked else None
            return Grammar.calls(_bundle(calls, schemas), marks=marks, parallel=self.parallel, otherwise=self.form)
        # A bare call and a JSON form may begin alike: only one schema for both tells them apart.
        form = _identified("", json.loads(self.form.text or '{"type": "object"}'))
        several = [{"type": "array", "items": {"anyOf": calls}, "minItems": 1}] if self.parallel else []
        return _bundle([*calls, *several, {"$ref": form["$id"]}], schemas | {"": form}, form.get("x-guidance"))

    def written_by(self, template: str, form: Grammar | None) -> Self:
        """Return these tools for a model with this template, whose answer is a call or of the `form`."""
        marked = OPEN in template or not _knows_tools(template)
        return replace(self, marked=marked, form=form)

    def parser(self) -> ToolCallParser:
        """Make a parser for one answer."""
        marked = self.marked if self.constrained and not self.forced else None
        form = self.form is not None and not self.forced
        return ToolCallParser(self.functions, forced=self.forced, marked=marked, form=form)

    def place(self, messages: Sequence[Message], template: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Return the messages and tools to render. A template without the word `tools` gets them in its messages."""
        listed = [{"type": "function", "function": _shown(function)} for function in self.functions.values()]
        if _knows_tools(template):
            return list(messages), listed
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in listed)
        return _with_instructions(spelt_out(messages), INSTRUCTIONS.format(tools=lines)), None


def read_tools(tools: Any, choice: Any = None, *, parallel: bool = True) -> Tools | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request; None: the answer has no calls."""
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
    chosen, names = _choice(choice, functions)
    return None if chosen == "none" else Tools(functions, chosen, names, parallel)


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
        parts = [part.get("text") or part.get("refusal") if isinstance(part, Mapping) else part for part in content]
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
    if not isinstance(function.get("strict", False), bool | None):
        raise InvalidRequest(f"strict of {where} must be true or false, not {function['strict']!r:.60}", param="tools")
    known = ("name", "description", "parameters", "strict")
    return {key: function[key] for key in known if function.get(key) is not None}


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what concerns the grammar alone, so that the model reads the same prompt with and without it."""
    return {key: value for key, value in function.items() if key != "strict"}


def _choice(choice: Any, functions: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Read `tool_choice`: auto, none, required or a name, and the names of the tools that may be called."""
    if choice is None:
        return "auto", tuple(functions)
    if isinstance(choice, str) and choice in CHOICES:
        return choice, tuple(functions)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), functions)
    name = _chosen_name(choice)
    if name is None:
        raise InvalidRequest(
            f"tool_choice must be auto, none, required, name a function or list allowed_tools, not {choice!r:.100}",
            param="tool_choice",
        )
    _check_offered(name, functions)
    return name, (name,)


def _allowed(allowed: Any, functions: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    names = [_chosen_name(tool) for tool in listed] if isinstance(listed, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise InvalidRequest(
            "allowed_tools needs a mode, auto or required, and a list of tools, each with type function and a name",
            param="tool_choice",
        )
    for name in names:
        _check_offered(name, functions)
    return mode, tuple(name for name in functions if name in names)


def _chosen_name(choice: Any) -> str | None:
    """Find the name of a function: wrapped, as in the chat API, or bare, as in the responses API."""
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    return name if isinstance(name, str) else None


def _check_offered(name: Any, functions: Mapping[str, Any]) -> None:
    if name not in functions:
        raise InvalidRequest(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")


def _knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters") or _NO_PARAMETERS
    return closed(schema) if function.get("strict") else schema


def _identified(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Give a schema an id, unless it has one. References within it are relative to the id, wherever it is placed."""
    own = schema.get("$id")
    known = isinstance(own, str) and own.strip("#") != "" and not own.startswith("#")
    return {**schema, "$id": own if known else f"urn:paceline:{name}"}


def _call_schema(name: str, key: str, arguments: str) -> dict[str, Any]:
    """Make the schema of {"name": …, "arguments": …}. `key`: the second name; `arguments`: the id of their schema."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": arguments}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _bundle(choices: Sequence[Any], schemas: Mapping[str, dict[str, Any]], options: Any = None) -> Grammar:
    """Make the grammar of JSON that fits one of the `choices`, which refer to `schemas` by their ids."""
    ids = [schema["$id"] for schema in schemas.values()]
    for schema_id in ids:
        if ids.count(schema_id) > 1:
            raise InvalidRequest(f"two schemas have the $id {schema_id!r:.100}; each needs its own", param="tools")
    own = {} if options is None else {"x-guidance": options}
    kept = {f"schema{i}": schema for i, schema in enumerate(schemas.values())}
    return Grammar.json_schema({"anyOf": list(choices), "$defs": kept, **own})
