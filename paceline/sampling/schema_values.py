"""Values and types that a JSON schema allows, and whether two schemas exclude each other.

Only certainty counts: what cannot be compared, or not within the budget, is taken to overlap.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COMPARISONS = 10_000  # of pairs of schemas, for one document
MAX_DEPTH = 8  # references and properties that are followed
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})

Values = frozenset[str]  # written as JSON


class Document:
    """A schema whose local references point into itself."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._values: dict[int, Values | None] = {}  # by the id of a schema, which the root keeps alive
        self._left = MAX_COMPARISONS

    def resolved(self, schema: Any) -> Any:
        """Follow references. Returns the last schema if one of them leads nowhere."""
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            found = self._at(reference) if isinstance(reference, str) else None
            if found is None:
                break
            schema = found
        return schema

    def _at(self, reference: str) -> Any:
        value = self._root if reference.startswith("#/") else None
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def values(self, schema: Any) -> Values | None:
        """List the values that fit a schema, or more than those. None: they are not listed in it."""
        schema = self.resolved(schema)
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._values:
            self._values[id(schema)] = listed_values(schema)
        return self._values[id(schema)]

    def types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """List the types that a schema allows. Integers count as numbers."""
        values = self.values(schema)
        return _types(schema) if values is None else frozenset(_type(json.loads(value)) for value in values)

    def pairwise_disjoint(self, choices: Sequence[Any]) -> bool:
        """True if no value fits two of the schemas."""
        listed = [self.values(choice) for choice in choices]
        known = [values for values in listed if values is not None]
        if len(known) == len(listed):
            return sum(map(len, known)) == len(frozenset[str]().union(*known))
        return all(self.disjoint(one, other) for one, other in itertools.combinations(choices, 2))

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True if no value fits both schemas."""
        self._left -= 1
        one, other = self.resolved(one), self.resolved(other)
        if self._left < 0 or depth > MAX_DEPTH or not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        ours, theirs = self.values(one), self.values(other)
        if ours is not None and theirs is not None:
            return ours.isdisjoint(theirs)
        if self.types(one).isdisjoint(self.types(other)):
            return True
        return _below(one, other) or _below(other, one) or self._told_apart(one, other, depth)

    def _told_apart(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """True if both are objects with a required property, such as a discriminator, that cannot have one value."""
        ours, theirs = one.get("properties"), other.get("properties")
        if not one.get("type") == other.get("type") == "object":
            return False
        if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
            return False
        required = {*_texts(one.get("required"))} & {*_texts(other.get("required"))}
        shared = [name for name in ours if name in required and name in theirs]
        return any(self.disjoint(ours[name], theirs[name], depth + 1) for name in shared)


def listed_values(schema: Mapping[str, Any]) -> Values | None:
    """List the values that fit a schema without references, or more than those. None: they are not listed in it."""
    if "const" in schema:
        listed = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        listed = schema["enum"]
    else:
        by_type = {"boolean": frozenset({"true", "false"}), "null": frozenset({"null"})}
        return by_type.get(str(schema.get("type")))
    types = _types(schema)
    return frozenset(_written(value) for value in listed if _type(value) in types)


def _below(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> bool:
    """True if both allow numbers alone, and all of `lower` are below those of `upper`."""
    if not {lower.get("type"), upper.get("type")} <= {"integer", "number"}:
        return False
    high = min(_bound(lower, "maximum", 1), _bound(lower, "exclusiveMaximum", 1))
    low = -min(_bound(upper, "minimum", -1), _bound(upper, "exclusiveMinimum", -1))
    meet = _bound(lower, "exclusiveMaximum", 1) > high and _bound(upper, "exclusiveMinimum", -1) > -low
    return math.isfinite(high) and (high < low or (high == low and not meet))


def _bound(schema: Mapping[str, Any], key: str, sign: int) -> float:
    bound = schema.get(key)
    known = isinstance(bound, int | float) and not isinstance(bound, bool)
    return sign * bound if known and bound is not None else math.inf


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _texts(given)
    return frozenset("number" if name == "integer" else name for name in names) or TYPES


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {str: "string", int: "number", float: "number", list: "array", dict: "object"}[type(value)]


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _written(value: Any) -> str:
    """Write a value as JSON, such that equal numbers are written alike: 1.0 is 1."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)
