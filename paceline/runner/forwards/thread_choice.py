"""How many threads run the passes of a model: as asked, else by a short measurement, which is kept in the cache.

Results have the same bits for any number of threads, so a stopwatch may decide on it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cache_home import cache_home
from paceline.kernels.cpu.pool import candidate_threads
from paceline.kernels.cpu.topology import Machine, read_machine

logger = logging.getLogger(__name__)
MEASURE_SECONDS = 0.4  # time of a measurement, but every candidate runs MIN_PASSES
MIN_PASSES = 2
MAX_PASSES = 30
WORTH = 0.85  # time of a pass, relative to the default's, below which another number of threads is chosen
MAX_WAITED = 0.05  # of the measurement: time that threads may wait for a CPU
RunPass = Callable[[], None]
Clock = Callable[[], float]


def _seconds_waited() -> float:
    """Return how long the threads of this process have waited for a CPU, all together; 0 where Linux does not tell."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile
            nanoseconds += int(file.read_text(encoding="ascii").split()[1])
    return nanoseconds / 1e9


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads, and the reason for it, shown to users."""

    threads: int
    why: str


def choose_threads(given: int | None, model: object, trial: Callable[[int], RunPass]) -> ThreadChoice:
    """Choose the number of threads of a model's passes. `model` tells models apart by its repr; `trial` returns a
    function that runs a typical pass with a number of threads."""
    machine = read_machine()
    if (known := known_choice(given, model, machine)) is not None:
        return known
    candidates = candidate_threads(machine)
    times = measure({count: trial(count) for count in candidates})
    if times is not None:
        _keep(_note(model, machine), times)
    choice = fastest(times) if times else ThreadChoice(candidates[0], "one a core; too busy a machine to measure")
    logger.info("threads: %d, %s", choice.threads, choice.why)
    return choice


def known_choice(given: int | None, model: object, machine: Machine | None = None) -> ThreadChoice | None:
    """Return a choice that needs no measurement; None: the next start measures."""
    machine = machine or read_machine()
    if given is not None:
        return ThreadChoice(given, "as asked for")
    candidates = candidate_threads(machine)
    if len(candidates) == 1:
        return ThreadChoice(candidates[0], "all that this process may use")
    times = _kept(_note(model, machine))
    return fastest(times) if times and list(times) == candidates else None


def measure(
    runs: Mapping[int, RunPass], clock: Clock = time.perf_counter, waited: Clock = _seconds_waited
) -> dict[int, float] | None:
    """Time the candidates in turns, and return the shortest seconds of each; None: other processes had the CPUs for
    too long, which `waited` tells."""
    for run in runs.values():
        run()  # the first pass maps memory
    times = dict.fromkeys(runs, float("inf"))
    began, waited_before, rounds = clock(), waited(), 0
    while rounds < MIN_PASSES or (rounds < MAX_PASSES and clock() < began + MEASURE_SECONDS):
        for count, run in runs.items():
            start = clock()
            run()
            times[count] = min(times[count], clock() - start)
        rounds += 1
    return times if waited() - waited_before <= MAX_WAITED * (clock() - began) else None


def fastest(times: Mapping[int, float]) -> ThreadChoice:
    """Choose by measured seconds. The first is the default: another has to be faster by more than noise."""
    default = next(iter(times))
    best = min(times, key=lambda count: times[count] * (WORTH if count == default else 1.0))
    others = ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in times.items() if count != best)
    return ThreadChoice(best, f"measured: {times[best] * 1e3:.2f} ms a pass, {others}")


# ── cache ──


def choices_folder() -> Path:
    return cache_home() / "threads"


def forget_choices() -> None:
    shutil.rmtree(choices_folder(), ignore_errors=True)


def _note(model: object, machine: Machine) -> Path:
    key = hashlib.sha256(f"{machine} {model}".encode()).hexdigest()[:20]
    return choices_folder() / f"{key}.json"


def _kept(note: Path) -> dict[int, float] | None:
    try:
        return {int(count): float(seconds) for count, seconds in json.loads(note.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # nothing there, or damaged


def _keep(note: Path, times: Mapping[int, float]) -> None:
    """Write a note. Without a writable cache nothing is kept, and the next start measures again."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(".new")
        fresh.write_text(json.dumps(times), encoding="utf-8")
        fresh.replace(note)
