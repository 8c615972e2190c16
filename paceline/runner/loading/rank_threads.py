"""How many ranks a machine has room for, and how many threads each of them uses."""

from __future__ import annotations

import os
from functools import cache

from paceline.errors import InvalidRequest
from paceline.kernels.cpu.abi import RANKS_MAX
from paceline.kernels.cpu.pool import default_threads
from paceline.kernels.cpu.topology import Machine, read_machine
from paceline.runner.forwards.thread_choice import ThreadChoice
from paceline.runner.parallel.split import Split


def check_ranks(degree: int) -> None:
    """Raise InvalidRequest if there are more ranks than cores: a rank that waits for a core delays all others."""
    cores = default_threads()
    most = min(cores, RANKS_MAX)
    if degree > most:
        raise InvalidRequest(
            f"tensor_parallel {degree}: each rank needs a core, and this process may use {cores}; take {most} at most"
        )


def check_threads(threads: int | None, *, same_bits: bool, compiled: bool) -> None:
    """Raise InvalidRequest for threads that would change bits: torch divides sums by the number of threads."""
    if same_bits and not compiled and threads not in (None, 1):
        raise InvalidRequest(
            f"threads {threads}: for the same bits across degrees each rank has one thread; give 1, or leave it out"
        )


def threads_by_cores(cores: int, degree: int) -> int:
    """Return the number of threads of each rank where all ranks together may use so many cores."""
    return max(1, cores // degree)


def threads_of_a_rank(split: Split, threads: int | None) -> ThreadChoice:
    """Return the number of threads of each rank."""
    if split.same_bits and not split.packed:
        return ThreadChoice(1, "for the same bits across degrees")
    if threads is not None:
        return ThreadChoice(threads, "a rank, as asked for")
    return ThreadChoice(max(1, default_threads() // split.degree), "a rank: cores by ranks")


def keep_to_own_cores(rank: int, *, degree: int, threads: int) -> None:
    """Let a worker use only the NUMA nodes of its place among the ranks: else all ranks would take the first node.

    Rank 0, which has the engine too, takes the first cores anyway."""
    cpus = cpus_of_a_rank(_whole_machine(), rank, degree=degree, threads=threads)
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def cpus_of_a_rank(machine: Machine, rank: int, *, degree: int, threads: int) -> set[int]:
    """Return the CPUs that a worker keeps to; none: it runs anywhere.

        cores    0 1 2 3 │ 4 5 6 7       of two nodes, for 2 ranks of 2 threads
        places   0         1             rank 1 keeps to all of the second node

    The places of ranks are as far apart as they can be, so that few threads still read memory of several nodes. All
    cores of these nodes are allowed: other servers on the machine choose the same nodes, and the system can move
    threads apart."""
    among = machine.performance if degree * threads <= len(machine.performance) else machine.cores
    first = rank * len(among) // degree
    nodes = {core.node for core in among[first : first + threads]}
    if rank == 0 or machine.nodes == 1 or len(among) < first + threads:
        return set()
    return {cpu for core in among if core.node in nodes for cpu in core.cpus}


@cache
def _whole_machine() -> Machine:
    """Return the machine as it was before this process kept to a part of it: a second model has the same place."""
    return read_machine()
