"""Rewrite JSON schemas as pydantic and others write them, so that the grammar compiler takes them.

A rewritten schema allows nothing that the original forbids, except what is named: a keyword that cannot be held is
dropped and its path listed, such as "properties.when.format". Values inside `const`, `enum`, `default` and `examples`
are data and stay as they are. This is no validator: the compiler reports schemas that are wrong.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.sampling.schema_values import Document, listed_values

# Formats that the compiler holds strings to, and patterns for others. Further formats are annotations.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
HEX = "[0-9a-fA-F]"
PATTERNS = {
    f"uuid{version}": f"^{HEX}{{8}}-{HEX}{{4}}-{version}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}$"
    for version in range(1, 9)
}
LARGEST = 2**63 - 1024  # largest bound of a number that the compiler takes
MAX_SET = 8  # members of a set whose subsets are listed: 2^8 of them
MAX_ADDED = 1 << 18  # characters that a document may grow by; beyond, sets and names of properties are not held
DRAFTS = re.compile(r"https?://json-schema\.org/draft(-0[4-7]|/2019-09|/2020-12)/schema#?")
LOOK_AROUND = re.compile(r"\(\?<?[=!]")

ONE = frozenset({"additionalProperties", "items", "propertyNames", "additionalItems", "contentSchema"})  # hold a schema
ONE |= frozenset({"not", "if", "then", "else", "contains", "unevaluatedItems", "unevaluatedProperties"})
MANY = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})  # hold a list of schemas
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # by name
ASSERTIONS = frozenset({"type", "const", "enum", "required", "format", "pattern", "minLength", "maxLength", "minItems"})
ASSERTIONS |= frozenset({"maxItems", "uniqueItems", "minProperties", "maxProperties", "minContains", "maxContains"})
ASSERTIONS |= frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref"})
ASSERTIONS |= frozenset({"dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "example", "deprecated", "readOnly"})
ANNOTATIONS |= frozenset({"writeOnly", "$comment", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"})
ANNOTATIONS |= frozenset({"contentMediaType", "contentEncoding", "discriminator", "x-guidance"})
ANNOTATIONS |= frozenset({"$defs", "definitions"})  # no effect where they stand
KNOWN = ONE | MANY | NAMED | ASSERTIONS | ANNOTATIONS

Schema = dict[str, Any]


def rewritten(schema: Schema) -> Schema:
    """Rewrite a schema for the compiler."""
    made: Schema = _Rewrite(schema, _Record()).schema(schema, "")
    return made


def closed(schema: Mapping[str, Any]) -> Schema:
    """Forbid properties that an object does not list, unless the schema speaks of them: what `strict` asks for.

    Objects that several schemas describe together, by allOf, stay as they are."""
    made = dict(schema)
    return made if '"allOf"' in json.dumps(made) else _closed(made)


def _closed(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    made = {key: _mapped(key, value, _closed) for key, value in given.items()}
    if isinstance(made.get("properties"), dict) and "$ref" not in made:
        made.setdefault("additionalProperties", False)
    return made


def _mapped(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the schemas that a keyword holds."""
    if key in MANY and isinstance(value, list):
        return [change(item) for item in value]
    if key in NAMED and isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    return change(value) if key in ONE else value


def ignored_keywords(schema: Any) -> list[str]:
    """List the paths of keywords in a schema that have no effect on a grammar, the standard's annotations apart."""
    record = _Record()
    if isinstance(schema, dict):
        _Rewrite(schema, record).schema(schema, "")
    return record.dropped


@dataclass(slots=True)
class _Record:
    """The outcome of a rewrite: paths of keywords without effect, and characters by which the document may grow."""

    dropped: list[str] = field(default_factory=list)
    room: int = MAX_ADDED

    def takes(self, characters: int) -> bool:
        """Take room for an expansion. False: there is too little."""
        fits = characters <= self.room
        self.room -= characters if fits else 0
        return fits


class _Rewrite:
    """Rewrites a document, in which local references point to `root`."""

    def __init__(self, root: Schema, record: _Record) -> None:
        self._root = root
        self._document = Document(root)
        self._record = record

    def schema(self, given: Any, path: str) -> Any:
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("$id"), str) and given is not self._root:  # references in it are relative to the id
            return _Rewrite(given, self._record).schema(given, path)
        made = {key: self._value(key, value, f"{path}{key}") for key, value in given.items()}
        self._record.dropped += [f"{path}{key}" for key in made if key not in KNOWN]
        for rewrite in (self._format, self._set, self._names, self._draft, self._alternatives):
            rewrite(made, path)
        _narrow(made)
        choices = given.get("oneOf")
        if isinstance(choices, list) and "anyOf" not in made and self._document.pairwise_disjoint(choices):
            made = {"anyOf" if key == "oneOf" else key: value for key, value in made.items()}
        return made

    def _value(self, key: str, value: Any, path: str) -> Any:
        if key in MANY and isinstance(value, list):
            return [self.schema(item, f"{path}[{i}].") for i, item in enumerate(value)]
        if key in NAMED and isinstance(value, dict):
            return {name: self.schema(item, f"{path}.{name}.") for name, item in value.items()}
        return self.schema(value, f"{path}.") if key in ONE else value

    def _format(self, made: Schema, path: str) -> None:
        name = made.get("format")
        if not isinstance(name, str) or name in FORMATS:
            return
        del made["format"]
        if name in PATTERNS and "pattern" not in made:
            made["pattern"] = PATTERNS[name]
        else:
            self._record.dropped.append(f"{path}format")

    def _set(self, made: Schema, path: str) -> None:
        """List the subsets of a small set, each in one order. Otherwise items may repeat."""
        if not made.pop("uniqueItems", False):
            return
        members = self._listed(made.get("items"))
        low, high = made.get("minItems", 0), made.get("maxItems", MAX_SET)
        plain = made.keys() - ANNOTATIONS <= {"type", "items", "minItems", "maxItems"}
        known = members is not None and len(members) <= MAX_SET and plain and _whole(low) and _whole(high)
        if members is None or not known or not self._record.takes(len(json.dumps(members)) << len(members)):
            self._record.dropped.append(f"{path}uniqueItems")
            return
        sizes = range(max(low, 0), min(high, len(members)) + 1)
        for key in ("items", "minItems", "maxItems"):
            made.pop(key, None)
        made["enum"] = [list(subset) for size in sizes for subset in itertools.combinations(members, size)]

    def _listed(self, schema: Any) -> list[Any] | None:
        """List exactly the values that fit a schema. None: they are not listed in it."""
        found = self._document.resolved(schema)
        plain = isinstance(found, dict) and found.keys() - ANNOTATIONS <= {"type", "enum", "const"}
        values = listed_values(found) if plain else None
        return None if values is None else [json.loads(value) for value in sorted(values)]

    def _names(self, made: Schema, path: str) -> None:
        """Turn `propertyNames` of a map into its properties, or into a pattern of them."""
        names = self._document.resolved(made.pop("propertyNames", True))
        if names is True or (isinstance(names, dict) and not names.keys() - ANNOTATIONS - {"type"}):
            return
        keys, pattern = self._listed(names), _name_pattern(names) if isinstance(names, dict) else None
        rest = made.get("additionalProperties", True)
        fits = keys is None or self._record.takes(len(keys) * len(json.dumps(rest)))
        if {"properties", "patternProperties"} & made.keys() or (keys is None and pattern is None) or not fits:
            self._record.dropped.append(f"{path}propertyNames")
            return
        made["additionalProperties"] = False
        if keys is None:
            made["patternProperties"] = {pattern: rest}
        else:
            made["properties"] = {key: rest for key in keys if isinstance(key, str)}

    def _draft(self, made: Schema, path: str) -> None:
        draft = made.get("$schema")
        if isinstance(draft, str) and not DRAFTS.fullmatch(draft):
            del made["$schema"]
            self._record.dropped.append(f"{path}$schema")

    def _alternatives(self, made: Schema, path: str) -> None:
        """Leave out alternatives whose pattern looks around, such as a Decimal's text beside its number."""
        choices = made.get("anyOf")
        if not isinstance(choices, list):
            return
        kept = [i for i, choice in enumerate(choices) if not _looks_around(choice)]
        if kept and len(kept) < len(choices):
            self._record.dropped += [f"{path}anyOf[{i}]" for i in range(len(choices)) if i not in kept]
            made["anyOf"] = [choices[i] for i in kept]


def _looks_around(choice: Any) -> bool:
    pattern = choice.get("pattern") if isinstance(choice, Mapping) else None
    return isinstance(pattern, str) and LOOK_AROUND.search(re.sub(r"\\.", "", pattern)) is not None


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    """Find the pattern that means the same as this schema of a name. None: there is none."""
    asserted = names.keys() - ANNOTATIONS - {"type"}
    if asserted == {"pattern"}:
        return str(names["pattern"])
    low, high = names.get("minLength", 0), names.get("maxLength")
    if not asserted <= {"minLength", "maxLength"} or not _whole(low) or not (high is None or _whole(high)):
        return None
    return rf"^[\s\S]{{{low},{'' if high is None else high}}}$"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _narrow(made: Schema) -> None:
    """Bring bounds of numbers within what the compiler takes: floats of 64 bits, towards zero where they round."""
    for key, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = made.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= 2**53:
            continue
        if sign * bound > LARGEST:
            made[key] = sign * LARGEST
        elif isinstance(bound, int):
            nearest = float(bound)
            made[key] = int(nearest if sign * nearest <= sign * bound else math.nextafter(nearest, -sign * math.inf))
