"""Where texts are tokenised: short ones on the event loop, long ones on threads.

The tokenizer works without the interpreter lock, so that a thread with a long text holds up nobody. Only the longest
texts take turns: many at once would leave no core to the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.server.lane import ENCODING

T = TypeVar("T")

LONG_TEXT = 20_000  # characters; longer texts are tokenised on a thread, not on the event loop
VERY_LONG_TEXT = 200_000  # characters; longer texts are tokenised one at a time


def characters(value: Any) -> int:
    """Count the characters of all texts in nested lists and objects; anything else counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(characters, value.values()))
    return sum(map(characters, value)) if isinstance(value, list) else 1


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """Do work on a text of `size` characters where it stalls no other request's stream."""
    if size < LONG_TEXT:
        return work()
    return await (asyncio.to_thread(work) if size < VERY_LONG_TEXT else ENCODING.do(work))
