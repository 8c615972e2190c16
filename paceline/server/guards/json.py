"""A check of JSON that is stricter than usual parsers, so that no two of them read a body differently.

Depth and counts are checked before parsing: a parser recurses, and keeps the interpreter to itself until it is done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from paceline.server.guards.check import Refusal

MAX_CONTAINERS = 100_000  # lists and objects in a body: they cost most to parse
MAX_STRINGS = 50_000  # names and texts in a body, which cost 2 µs each to parse
SCAN_BYTES = 1 << 18  # part of a body that is scanned at once


def check_json(body: bytes, *, max_depth: int, max_values: int) -> Any:
    """Parse a body. Raise Refusal unless it is JSON that every parser reads alike.

    Such JSON is UTF-8 without a byte order mark. It repeats no name within an object, has no NaN and no half of a
    surrogate pair, and is nested no deeper and has no more values than allowed."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        _bad_json("begins with a byte order mark; leave it out")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _bad_json(f"is not UTF-8 at byte {error.start}")
    shape = Shape.of(body)
    if shape.depth > max_depth:
        _bad_json(f"is nested deeper than the {max_depth} levels that are allowed")
    if shape.containers > MAX_CONTAINERS:
        _bad_json(f"has {shape.containers} lists and objects, {MAX_CONTAINERS} are allowed")
    if shape.strings > MAX_STRINGS:
        _bad_json(f"has {shape.strings} names and texts, {MAX_STRINGS} are allowed")
    if shape.values > max_values:
        _bad_json(f"has {shape.values} values, {max_values} are allowed")
    parsed = _parse(text)
    if b"\\ud" in body or b"\\uD" in body:
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            _bad_json("has half of a surrogate pair in a text")
    return parsed


@dataclass(slots=True)
class Shape:
    """Counts of a body, found without parsing it. They are right for JSON; other bodies fail in the parser."""

    depth: int = 0  # greatest
    containers: int = 0
    quotes: int = 0
    commas: int = 0  # outside of strings

    @classmethod
    def of(cls, body: bytes) -> Shape:
        """Scan a body part by part, in time linear in its size and without the interpreter lock for most of it."""
        shape, level, slashes = cls(), 0, 0
        for start in range(0, len(body), SCAN_BYTES):
            part = np.frombuffer(body, np.uint8, min(SCAN_BYTES, len(body) - start), start)
            quotes, slashes = _quotes(part, slashes)
            level = shape._add(part, quotes, level)
        return shape

    @property
    def strings(self) -> int:
        return self.quotes // 2

    @property
    def values(self) -> int:
        return self.commas + self.containers + 1

    def _add(self, part: np.ndarray, quotes: np.ndarray, level: int) -> int:
        """Count a part that begins at the depth `level`. Return the depth at its end."""
        inside = np.zeros(len(part), np.uint8)
        inside[quotes] = 1
        np.bitwise_xor.accumulate(inside, out=inside)
        outside = part[inside == self.quotes % 2]
        opens = (outside == ord("[")) | (outside == ord("{"))
        closes = (outside == ord("]")) | (outside == ord("}"))
        levels = level + np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
        self.depth = max(self.depth, int(levels.max(initial=0)))
        self.containers += int(np.count_nonzero(opens))
        self.commas += int(np.count_nonzero(outside == ord(",")))
        self.quotes += len(quotes)
        return int(levels[-1]) if len(levels) else level


def _quotes(part: np.ndarray, slashes: int) -> tuple[np.ndarray, int]:
    """Find the quotes in a part that begin or end a string: those after an even number of backslashes.

    `slashes`: backslashes right before the part. Also return how many end the part."""
    quotes = np.flatnonzero(part == ord('"'))
    places = np.flatnonzero(part != ord("\\"))  # of all that is no backslash
    before = np.searchsorted(places, quotes) - 1  # index of the last such place before each quote; -1: none
    last = np.where(before >= 0, places[before], -1 - slashes) if len(places) else quotes
    end = len(part) - 1 - int(places[-1]) if len(places) else slashes + len(part)
    return quotes[(quotes - last) % 2 == 1], end


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits raise ValueError, too
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        _bad_json(f"is not valid JSON{where}")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        _bad_json(f"has {twice[:100]!r} twice in one object")
    return made


def _constant(name: str) -> NoReturn:
    _bad_json(f"has the value {name}, which is not JSON")


def _bad_json(problem: str) -> NoReturn:
    raise Refusal(400, f"the body {problem}", "invalid_json")
