"""The threads that run the C kernels: how many, on which CPUs, and the one pool that all programs share (pool.c)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from functools import cache
from itertools import accumulate

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.topology import Core, Machine, read_machine

MAX_CANDIDATES = 5  # numbers of threads worth a measurement
Seats = tuple[tuple[int, ...], ...]  # CPUs of each thread; an empty tuple: it runs anywhere


def default_threads(machine: Machine | None = None) -> int:
    """Count the performance cores that this process may use, within the quota of its cgroups."""
    machine = machine or read_machine()
    return min(max(1, len(machine.performance)), _limit(machine))


def candidate_threads(machine: Machine) -> list[int]:
    """Return numbers of threads that may be the fastest, the default first: all cores, those of one kind, those of one
    NUMA node, and halves. A pass that waits for memory gains nothing from more threads than saturate it."""
    default, limit = default_threads(machine), _limit(machine)
    best = machine.performance
    counts = {default, len(machine.cores), sum(core.node == best[0].node for core in best)}
    counts |= {default >> shift for shift in range(1, MAX_CANDIDATES)}
    fitting = sorted((count for count in counts if 1 <= count <= limit and count != default), reverse=True)
    return [default, *fitting[: MAX_CANDIDATES - 1]]


def _limit(machine: Machine) -> int:
    """Return the most threads that run at once: more would be suspended together when the quota is spent."""
    return len(machine.cores) if machine.quota is None else max(1, min(len(machine.cores), int(machine.quota)))


def seats(machine: Machine, threads: int) -> Seats:
    """Return the CPUs that each thread is held to.

    If threads use all cores of a kind and node, each has a core. Otherwise each may use any of them: other processes
    choose the same ones, and the system can move threads apart."""
    anywhere: Seats = ((),) * threads
    if not 1 < threads <= len(machine.cores):
        return anywhere
    used = machine.cores[:threads]
    if threads == len(machine.cores) or not any(
        _alike(core, chosen) for core in machine.cores[threads:] for chosen in used
    ):
        return tuple(core.cpus for core in used)
    held = tuple(tuple(cpu for core in machine.cores if _alike(core, chosen) for cpu in core.cpus) for chosen in used)
    everything = sum(len(core.cpus) for core in machine.cores)
    return anywhere if all(len(cpus) == everything for cpus in held) else held


def _alike(core: Core, other: Core) -> bool:
    return (core.efficient, core.node) == (other.efficient, other.node)


@cache
def thread_pool(library: Library, threads: int) -> int:
    """Return the address of the pool of `threads` threads; it exists until the process ends."""
    assert threads > 0, f"{threads} threads"
    held = seats(read_machine(), threads)
    pool = library.paceline_pool_new(threads, *_flat(held))
    if not pool:
        raise OutOfMemory(f"no memory for a team of {threads} threads")
    return int(pool)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[object, object]:
    """Lay lists end to end for C: where each begins, and all entries."""
    starts = [0, *accumulate(map(len, lists))]
    entries = [cpu for cpus in lists for cpu in cpus]
    return (c_int32 * len(starts))(*starts), (c_int32 * max(1, len(entries)))(*entries)
