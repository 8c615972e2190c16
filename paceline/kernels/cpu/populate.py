"""Memory that the system provides before it is written to: on a thread, some way ahead of where it is used.

The first write to a page of new memory waits for the system: on a virtual machine 5 ms for each 2 MiB, more than a step
of a small model. `madvise` can do that beforehand and leaves what is written as it is. Systems without it provide
memory when it is written to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
AHEAD_BYTES = 16 << 20  # from where memory is used to where the system provides it: some 50 ms of its time


class Populated:
    """A piece of memory that is used from its beginning on."""

    def __init__(self, address: int, length: int) -> None:
        self._first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = (address + length - self._first) // mmap.PAGESIZE * mmap.PAGESIZE
        self._asked = 0  # bytes that the system was asked for
        self.reach(0)

    def reach(self, used: int) -> None:
        """Note that so many bytes are used, and have those behind them provided."""
        if used + AHEAD_BYTES // 2 < self._asked or self._asked >= self._bytes:
            return
        first, self._asked = self._asked, min(max(used, self._asked) + AHEAD_BYTES, self._bytes)
        worker = _worker()
        if worker is not None:
            worker.submit(_populate, self._first + first, self._asked - first)


@cache
def _worker() -> ThreadPoolExecutor | None:
    """Return the thread that asks the system for memory; None: this system cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    return ThreadPoolExecutor(1, thread_name_prefix="memory ahead")


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _populate(address: int, length: int) -> bool:
    """Ask for memory, and return whether the system knows how; other threads run meanwhile."""
    return bool(_libc().madvise(address, length, MADV_POPULATE_WRITE) == 0)
