"""A check of JSON that is stricter than usual parsers, so that no two of them read a body differently."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from paceline.server.guards.check import Refusal

MAX_CONTAINERS = 100_000  # lists and objects in a body: they cost most to parse
MAX_STRINGS = 50_000  # names and texts in a body: about 0.3 s to parse, during which nothing else is served

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def check_json(body: bytes, *, max_depth: int) -> None:
    """Raise Refusal unless the body is JSON that every parser reads alike.

    Such JSON is UTF-8 without a byte order mark. It repeats no name within an object, has no NaN and no half of a
    surrogate pair, and is nested no deeper than allowed. Depth is checked before parsing, which recurses."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        _bad_json("begins with a byte order mark; leave it out")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _bad_json(f"is not UTF-8 at byte {error.start}")
    if (strings := _strings(body)) > MAX_STRINGS:
        _bad_json(f"has {strings} names and texts, {MAX_STRINGS} are allowed")
    depth, containers = _nesting(body)
    if depth > max_depth:
        _bad_json(f"is nested deeper than the {max_depth} levels that are allowed")
    if containers > MAX_CONTAINERS:
        _bad_json(f"has {containers} lists and objects, {MAX_CONTAINERS} are allowed")
    parsed = _parse(text)
    if b"\\ud" in body or b"\\uD" in body:
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            _bad_json("has half of a surrogate pair in a text")


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits raise ValueError, too
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        _bad_json(f"is not valid JSON{where}")


def _strings(body: bytes) -> int:
    """Count the strings of a body, fast. A string that ends in a backslash counts as half."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _nesting(body: bytes) -> tuple[int, int]:
    """Return the greatest depth of brackets and the number of opening ones. The parser checks that they pair."""
    brackets = np.frombuffer(STRING.sub(b"", body).translate(BRACKETS, NO_BRACKETS), dtype=np.int8)
    opens = brackets == ord("[")
    depths = np.cumsum(np.where(opens, np.int8(1), np.int8(-1)), dtype=np.int32)
    return int(depths.max(initial=0)), int(opens.sum())


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
