"""One thread for long inputs, so that no request waits for another's megabytes.

It does one piece of work after the other, the smallest first. So many long inputs at once take the time of one core,
and the memory of one at work; the event loop, the engine and shorter inputs go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """The thread, with the works that wait for it. Belongs to one event loop at a time."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: size, order of arrival, its turn
        self._arrivals = itertools.count()

    async def do(self, work: Callable[[], T], *, size: int) -> T:
        """Do work on so many characters or bytes, once no smaller one waits."""
        loop = asyncio.get_running_loop()
        if self._busy:
            turn: asyncio.Future[None] = loop.create_future()
            heapq.heappush(self._waiting, (size, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had come already
                    self._pass_on()
                raise
        self._busy = True
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    def do_later(self, work: Callable[[], None]) -> None:
        self._thread.submit(work)

    def _pass_on(self) -> None:
        """Give the turn to the smallest work whose caller still waits."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps what long inputs took, since it expects more of them."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


LONG_INPUT = Lane("long-input")
