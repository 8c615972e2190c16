"""Threads for long inputs, so that no request waits for another's megabytes.

A lane has one thread, and does one piece of work after the other, in the order of arrival. So many long inputs at once
take the time of one core, and the memory of one at work; the event loop and the engine go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lane:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def do_later(self, work: Callable[[], None]) -> None:
        self._thread.submit(work)


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps what long inputs took, since it expects more of them."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


PARSING = Lane("long-bodies")  # JSON of long bodies
ENCODING = Lane("long-texts")
ENCODING_LONGEST = Lane("longest-texts")  # apart, since each may take seconds
