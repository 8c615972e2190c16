"""Checks of single values, shared by every record that validates itself where it is made.

Each raises InvalidRequest with a message that says what was given and what is allowed. `name` names the value in
the message; `param` is the field at fault, by default `name`. `check_text` names no field by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from paceline.errors import InvalidRequest, UnknownOption

MAX_STOPS = 64  # stop strings of a request
MAX_STOP_LENGTH = 1024  # characters of a stop string


def check_known(cls: type[Any], given: Mapping[str, Any], *, kind: str | None = None) -> None:
    """Raise UnknownOption for a name that is no field of the record `cls`."""
    known = {f.name for f in fields(cls)}
    for name in given:
        if name not in known:
            raise UnknownOption(kind or f"{cls.__name__} option", name, known)


def check_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    """Raise InvalidRequest unless `value` is a finite number in [low, high], or in (low, high] if `open_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=param or name)
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}", param=param or name)


def check_integer(name: str, value: object, low: int, high: int, *, param: str | None = None) -> None:
    """Raise InvalidRequest unless `value` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", param=param or name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=param or name)


def check_flag(name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is a bool."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, not {value!r}", param=name)


def checked_tuple(name: str, value: Any, *, param: str | None = None) -> tuple[Any, ...]:
    """Return the items of an iterable as a tuple. Raises InvalidRequest for a text or a single value."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, not {value!r}", param=param or name)
    return tuple(value)


def check_stops(stops: Sequence[object]) -> None:
    """Raise InvalidRequest unless these are stop strings that a text can contain, and not too many."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, not {len(stops)}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(f"a stop string must be a non-empty text, not {stop!r}", param="stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters; allowed are 1 to {MAX_STOP_LENGTH}", param="stop"
            )
        if surrogate_at(stop) is not None:
            raise InvalidRequest(
                f"stop string {stop!r:.60} holds half a surrogate pair, which no text can contain", param="stop"
            )


def check_text(text: object, where: str = "text", *, param: str | None = None) -> None:
    """Raise InvalidRequest unless `text` is a str of valid Unicode. `where` says which text it is."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} must be a string, not {type(text).__name__}", param=param)
    place = surrogate_at(text)
    if place is not None:
        raise InvalidRequest(f"{where} must be valid Unicode; character {place} is half a surrogate pair", param=param)


def surrogate_at(text: str) -> int | None:
    """Find the index of the first surrogate, which no valid Unicode text contains. None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
