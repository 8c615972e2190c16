"""Limits of JSON schemas, beyond those of the grammar compiler.

Its own limits do not bound its time: regular expressions that must match at once, multiples of large numbers and long
texts can take minutes. Such schemas are refused here. This is no validator of schemas: the compiler reports other
errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from paceline.sampling.schema_rewrites import rewritten

MAX_TEXT = 1 << 13  # characters of a pattern, or of a text that must be matched to the letter
MAX_PATTERNS = 1 << 15  # characters of all patterns together
MAX_JOINED = 8  # patterns of a schema, if several may have to match at once
MAX_MULTIPLE = 10_000  # sum of all multiples; their least common multiple if several may have to hold at once
OPTIONS = {"whitespace_flexible", "coerce_one_of", "lenient"}  # options of the compiler, under "x-guidance"
_JOINS = {"pattern", "patternProperties", "multipleOf", "format", "minLength", "maxLength"}


def checked_schema(text: str) -> dict[str, Any]:
    """Parse a schema, rewrite it for the compiler and check its limits. Raises ValueError, which says what is wrong."""
    schema = rewritten(_parsed(text))
    parts = list(_objects(schema))
    patterns = [pattern for part in parts for pattern in _patterns(part)]
    texts = [string for part in parts for string in _texts(part)]
    if any(len(string) > MAX_TEXT for string in (*patterns, *texts)):
        raise ValueError(f"a pattern or a text in it is too big: at most {MAX_TEXT} characters are allowed")
    if sum(map(len, patterns)) > MAX_PATTERNS:
        raise ValueError(f"its patterns are too big: at most {MAX_PATTERNS} characters in all are allowed")
    joined = any(map(_joins, parts))
    if joined and len(patterns) > MAX_JOINED:
        raise ValueError(f"{len(patterns)} patterns beside allOf are too many: {MAX_JOINED} are allowed")
    multiples = [_numerator(part["multipleOf"]) for part in parts if "multipleOf" in part]
    if (math.lcm(*multiples) if joined else sum(multiples)) > MAX_MULTIPLE:
        raise ValueError(f"a multipleOf is too big: all add up to {MAX_MULTIPLE} at most, or multiply beside allOf")
    if unknown := sorted({*_mapping(schema.get("x-guidance"))} - OPTIONS):
        raise ValueError(f"x-guidance has {unknown[0]!r:.60}; allowed are {', '.join(sorted(OPTIONS))}")
    return schema


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object or true, not {text[:60]}")
    return schema


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _patterns(part: Mapping[str, Any]) -> list[str]:
    own = part.get("pattern")
    return [*([own] if isinstance(own, str) else []), *_mapping(part.get("patternProperties"))]


def _texts(part: Mapping[str, Any]) -> list[str]:
    choices = part.get("enum")
    given = [part.get("const"), *(choices if isinstance(choices, list) else [])]
    return [*part, *(text for text in given if isinstance(text, str))]


def _joins(part: Mapping[str, Any]) -> bool:
    """True if several schemas may have to hold for one value."""
    both, beside = part.get("allOf"), not _JOINS.isdisjoint(part)
    return ("$ref" in part and beside) or (isinstance(both, list) and (len(both) > 1 or beside))


def _numerator(multiple: Any) -> int:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < 1e12:
        return 1  # the compiler says what is wrong with it
    return Decimal(str(multiple)).as_integer_ratio()[0]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
