"""The threads that run the C kernels: how many, and the one pool that all programs of a process share (pool.c)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import Library

TOPOLOGY = "/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"


def default_threads() -> int:
    """Count the cores that this process may run on; hyperthreads of one core count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len({_core(cpu) for cpu in allowed}))


def _core(cpu: int) -> str:
    """Name the core of a CPU: the list of its hyperthreads, or the CPU itself where Linux does not tell."""
    try:
        return Path(TOPOLOGY.format(cpu=cpu)).read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)


@cache
def thread_pool(library: Library, threads: int) -> int:
    """Return the address of the pool of `threads` threads; it exists until the process ends."""
    assert threads > 0, f"{threads} threads"
    import ctypes
    if os.environ.get("NOPIN") or threads != 2:
        pool = library.paceline_pool_new(threads, None, None)
    else:
        pool = library.paceline_pool_new(threads, (ctypes.c_int32*3)(0,1,2), (ctypes.c_int32*2)(1,0))
    if not pool:
        raise OutOfMemory(f"no memory for a team of {threads} threads")
    return int(pool)
