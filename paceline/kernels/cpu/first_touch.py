"""Weights on the NUMA node of the threads that read them.

Linux places a page of memory on the node of the CPU that first writes to it. A matrix is shared by tiles: each thread
begins with its own part (pool.h). So before weights are read, each part is touched on the node of its thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from paceline.kernels.cpu.memory import Region
from paceline.kernels.cpu.topology import Core, Machine

SMALL_PAGE_BYTES = 4096
Span = tuple[int, int]  # first byte and end


def touch_by_node(memory: Region, matrices: Iterable[tuple[int, int, int]], machine: Machine, threads: int) -> int:
    """Touch matrices (offset, number and distance of their tiles) where their threads run; return the number of nodes.
    Nothing is done for one node."""
    cores = machine.cores[:threads]
    nodes = sorted({core.node for core in cores})
    if len(nodes) < 2 or threads > len(machine.cores) or not hasattr(os, "sched_setaffinity"):
        return 1
    known = list(matrices)
    with ThreadPoolExecutor(len(nodes)) as workers:
        for node in nodes:
            spans = [span for i, core in enumerate(cores) if core.node == node for span in part(known, i, threads)]
            workers.submit(_touch, memory, spans, [core for core in cores if core.node == node]).result()
    return len(nodes)


def part(matrices: Iterable[tuple[int, int, int]], member: int, threads: int) -> Iterator[Span]:
    """Yield the bytes of each matrix that one of the threads reads first, as pool.c shares tiles."""
    for offset, tiles, size in matrices:
        first, last = tiles * member // threads, tiles * (member + 1) // threads
        yield offset + first * size, offset + last * size


def _touch(memory: Region, spans: Iterable[Span], cores: Iterable[Core]) -> None:
    """Write to every page of the spans, on the CPUs of these cores. The thread ends afterwards."""
    with suppress(OSError):  # CPUs that were taken away meanwhile
        os.sched_setaffinity(0, {cpu for core in cores for cpu in core.cpus})
    view = np.frombuffer(memory.view(), dtype=np.uint8)
    for first, end in spans:
        view[first:end:SMALL_PAGE_BYTES] = 0
