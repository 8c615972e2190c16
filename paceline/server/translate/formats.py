"""The form of an answer, `response_format` or `text.format`, as a grammar that is not compiled yet."""

from __future__ import annotations

from typing import Any

from paceline.errors import InvalidRequest
from paceline.sampling.schema_rewrites import closed
from paceline.server.protocol.requests import FormatOptions, ResponsesRequest
from paceline.types import Grammar


def read_format(format: FormatOptions | None, field: str) -> Grammar | None:
    """Make the grammar of an answer of this form. None: any text. `field`: its name in the body, for errors."""
    if format is None or format.type == "text":
        return None
    try:
        if format.type == "json_object":
            return Grammar.json_object()
        if format.type == "json_schema":
            return Grammar.json_schema(_schema(format, field))
        if format.type == "regex":
            return Grammar.regex(_pattern(format, field))
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=field) from None
    known = "text, json_object, json_schema or regex"
    raise InvalidRequest(f"the type of {field} must be {known}, not {format.type[:60]!r}", param=field)


def _schema(format: FormatOptions, field: str) -> dict[str, Any]:
    given = format.json_schema or {}
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, dict):
        raise InvalidRequest(f'{field} of type json_schema needs a schema: {{"name": …, "schema": {{…}}}}', param=field)
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"strict of {field} must be true or false, not {strict!r:.60}", param=field)
    return closed(schema) if strict else schema


def _pattern(format: FormatOptions, field: str) -> str:
    if not format.pattern:
        raise InvalidRequest(f"{field} of type regex needs a pattern", param=field)
    return format.pattern


def text_format(body: ResponsesRequest) -> FormatOptions | None:
    """Read the form that /v1/responses nests in `text.format`, with the schema's fields beside the type."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest("text.format needs a type: text, json_object, json_schema or regex", param="text.format")
    schema = {name: value for name, value in given.items() if name != "type"} if kind == "json_schema" else None
    pattern = given.get("pattern")
    return FormatOptions(type=kind, json_schema=schema, pattern=pattern if isinstance(pattern, str) else None)
