"""How many ranks a machine has room for, and how many threads each of them uses."""

from __future__ import annotations

import os

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


def threads_of_a_rank(split: Split, threads: int | None) -> ThreadChoice:
    """Return the number of threads of each rank."""
    if split.same_bits and not split.compiled:
        return ThreadChoice(1, "for the same bits across degrees")
    if threads is not None:
        return ThreadChoice(threads, "a rank, as asked for")
    return ThreadChoice(max(1, default_threads() // split.degree), "a rank: cores by ranks")


def keep_to_own_cores(rank: int, threads: int) -> None:
    """Let a worker use only its own cores where memory has several nodes: else all ranks would take those of the first.

    Rank 0, which has the engine too, takes the first cores anyway."""
    cpus = cpus_of_a_rank(read_machine(), rank, threads)
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def cpus_of_a_rank(machine: Machine, rank: int, threads: int) -> set[int]:
    """Return the CPUs that a worker keeps to; none: it runs anywhere."""
    cores = machine.cores[rank * threads : (rank + 1) * threads]
    if rank == 0 or machine.nodes == 1 or len(cores) < threads:
        return set()
    return {cpu for core in cores for cpu in core.cpus}
