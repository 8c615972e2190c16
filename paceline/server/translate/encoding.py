"""Tokenising of texts: short ones on the event loop, long ones on a thread.

The tokenizer works without the interpreter lock, so that a thread with a long text holds up nobody. Long texts take
turns, the shortest first: many at once would leave no core to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from paceline.errors import InvalidRequest
from paceline.server.lane import LONG_INPUT

T = TypeVar("T")

LONG_TEXT = 20_000  # characters; longer texts are tokenised on a thread, not on the event loop


def characters(value: Any) -> int:
    """Count the characters of all texts in nested lists and objects; anything else counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(characters, value.values()))
    return sum(map(characters, value)) if isinstance(value, list) else 1


def check_bytes(value: Any, *, allowed: int, field: str) -> None:
    """Raise InvalidRequest if the texts of a body have more bytes than may be tokenised for their count."""
    if (size := _bytes(value)) > allowed:
        raise InvalidRequest(f"the text has {size} bytes, {allowed} are allowed: tokenise it in parts", param=field)


def _bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, BaseModel):
        return _bytes({**value.__dict__, **(value.model_extra or {})})
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list) else 1


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Do work on a text of `size` characters where it stalls no other request's stream."""
    return work() if size < LONG_TEXT else await LONG_INPUT.do(work, size=size)
