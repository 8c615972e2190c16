"""How many ranks a machine has room for, and how many threads each of them uses."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.kernels.cpu.pool import default_threads
from paceline.runner.forwards.thread_choice import ThreadChoice
from paceline.runner.parallel.split import Split


def check_ranks(degree: int) -> None:
    """Raise InvalidRequest if there are more ranks than cores: a rank that waits for a core delays all others."""
    cores = default_threads()
    if degree > cores:
        raise InvalidRequest(
            f"tensor_parallel {degree}: each rank needs a core, and this process may use {cores}; take {cores} at most"
        )


def check_threads(threads: int | None, *, same_bits: bool) -> None:
    """Raise InvalidRequest for threads that would change bits: torch divides sums by the number of threads."""
    if same_bits and threads not in (None, 1):
        raise InvalidRequest(
            f"threads {threads}: for the same bits across degrees each rank has one thread; leave threads out"
        )


def threads_of_a_rank(split: Split, threads: int | None) -> ThreadChoice:
    """Return the number of threads of each rank."""
    if split.same_bits:
        return ThreadChoice(1, "for the same bits across degrees")
    if threads is not None:
        return ThreadChoice(threads, "a rank, as asked for")
    return ThreadChoice(max(1, default_threads() // split.degree), "a rank: cores by ranks")
