"""Names of fields without effect inside tools, schemas and messages, for `ignored_fields`.

`protocol.requests.ignored` finds the fields that a body's own models do not know. The objects here have no model: their
fields are the client's. A schema counts where a grammar follows it; elsewhere the model reads it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.chat.tools import Tools
from paceline.sampling.schema_rewrites import ignored_keywords
from paceline.server.protocol.requests import ChatRequest, CompletionRequest, ResponsesRequest

FUNCTION = frozenset({"name", "description", "parameters", "strict"})
SCHEMA = frozenset({"name", "description", "schema", "strict"})
MESSAGE_FIELD = re.compile(r"(?:messages|input)\[\d+\]\.(\w+)")


def unused_in_schemas(body: ChatRequest | CompletionRequest | ResponsesRequest, tools: Tools | None) -> list[str]:
    """List names in the tools and the form of a body. A large schema may take half a second."""
    given = () if isinstance(body, CompletionRequest) else body.tools or ()
    return [*_in_tools(given, tools), *_in_format(body)]


def _in_tools(given: Iterable[Any], tools: Tools | None) -> Iterator[str]:
    """Yield the names of fields of tools that are not read, and of keywords that do not shape a call."""
    for i, tool in enumerate(given):
        wrapped = isinstance(tool, Mapping) and "function" in tool
        function, path = (tool["function"], f"tools[{i}].function.") if wrapped else (tool, f"tools[{i}].")
        if wrapped:
            yield from (f"tools[{i}].{name}" for name in tool if name not in ("type", "function"))
        yield from (path + name for name in function if name not in FUNCTION and (wrapped or name != "type"))
        if tools is not None and tools.constrained and function["name"] in tools.callable:
            yield from (f"{path}parameters.{name}" for name in ignored_keywords(function.get("parameters")))


def _in_format(body: ChatRequest | CompletionRequest | ResponsesRequest) -> Iterator[str]:
    """Yield the names of fields of a form that are not read, and of keywords of its schema that do not shape it."""
    if isinstance(body, ResponsesRequest):
        given = (body.text and body.text.format) or {}
        path, known = "text.format.", SCHEMA | {"type", "pattern"}
    else:
        given = (body.response_format and body.response_format.json_schema) or {}
        path, known = "response_format.json_schema.", SCHEMA
    yield from (path + name for name in given if name not in known)
    yield from (f"{path}schema.{name}" for name in ignored_keywords(given.get("schema")))


def without_mentioned(names: Iterable[str], words: frozenset[str]) -> Iterator[str]:
    """Leave out fields of messages that the chat template mentions: it may use them."""
    for name in names:
        field = MESSAGE_FIELD.fullmatch(name)
        if field is None or field[1] not in words:
            yield name
