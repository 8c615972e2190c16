"""How many threads run the passes of a model: as asked, else by a short measurement.

Results have the same bits for any number of threads, so a stopwatch may decide on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.kernels.cpu.pool import candidate_threads
from paceline.kernels.cpu.topology import read_machine
from paceline.runner.forwards.measuring import RunPass, Times, best_of, kept_times, times_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads, and the reason for it, shown to users."""

    threads: int
    why: str


def choose_threads(given: int | None, model: object, trial: Callable[[int], RunPass]) -> ThreadChoice:
    """Choose the number of threads of a model's passes. `model` tells models apart by its repr; `trial` returns a
    function that runs a typical pass with a number of threads."""
    candidates = candidate_threads(read_machine())
    if given is not None or len(candidates) == 1:
        return known_choice(given, model)
    times = times_of(("threads", model), list(map(str, candidates)), lambda name: trial(int(name)))
    choice = ThreadChoice(candidates[0], "the machine was too busy to measure") if times is None else _fastest(times)
    logger.info("%d threads: %s", choice.threads, choice.why)
    return choice


def known_choice(given: int | None, model: object) -> ThreadChoice:
    """Return the choice as far as it is known without a measurement."""
    if given is not None:
        return ThreadChoice(given, "as asked for")
    candidates = candidate_threads(read_machine())
    if len(candidates) == 1:
        return ThreadChoice(candidates[0], "all that this process may use")
    times = kept_times(("threads", model), list(map(str, candidates)))
    return ThreadChoice(candidates[0], "until the first start measures") if times is None else _fastest(times)


def _fastest(times: Times) -> ThreadChoice:
    best = best_of(times)
    others = ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in times.items() if count != best)
    return ThreadChoice(int(best), f"measured: {times[best] * 1e3:.2f} ms a pass, {others}")
