"""Short measurements of passes, kept in the cache by machine and question.

They may decide on whatever changes no text: the number of threads, the format of a drafter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cache_home import cache_home
from paceline.kernels.cpu.topology import Machine, read_machine

MEASURE_SECONDS = 0.4  # time of a measurement, but every candidate runs MIN_PASSES
MIN_PASSES = 2
MAX_PASSES = 30
MAX_WAITED = 0.05  # of the measurement: time that threads may wait for a CPU
WORTH = 0.85  # time of a pass, relative to the default's, below which another candidate is worth a change

RunPass = Callable[[], None]
Times = dict[str, float]  # candidate → seconds of a pass; the default is the first
Clock = Callable[[], float]


def seconds_waited() -> float:
    """Return how long the threads of this process have waited for a CPU, all together; 0 where Linux does not tell."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile
            nanoseconds += int(file.read_text(encoding="ascii").split()[1])
    return nanoseconds / 1e9


def measure(
    runs: Mapping[str, RunPass], clock: Clock = time.perf_counter, waited: Clock = seconds_waited
) -> Times | None:
    """Time the candidates in turns, and return the shortest seconds of each; None: other processes had the CPUs for
    too long, which `waited` tells."""
    for run in runs.values():
        run()  # the first pass maps memory
    times = dict.fromkeys(runs, float("inf"))
    began, waited_before, rounds = clock(), waited(), 0
    while rounds < MIN_PASSES or (rounds < MAX_PASSES and clock() < began + MEASURE_SECONDS):
        for name, run in runs.items():
            start = clock()
            run()
            times[name] = min(times[name], clock() - start)
        rounds += 1
    return times if waited() - waited_before <= MAX_WAITED * (clock() - began) else None


def best_of(times: Times) -> str:
    """Return the fastest candidate; one that is not the default has to be faster by more than noise."""
    default = next(iter(times))
    return min(times, key=lambda name: times[name] * (WORTH if name == default else 1.0))


def times_of(question: object, candidates: Sequence[str], trial: Callable[[str], RunPass]) -> Times | None:
    """Return the seconds of each candidate, kept or measured now; None: the machine is too busy to measure.

    `trial` returns a function that runs a pass of a candidate."""
    return answers_to(question, candidates, lambda: measure({name: trial(name) for name in candidates}))


def answers_to(question: object, names: Sequence[str], find: Callable[[], Times | None]) -> Times | None:
    """Return numbers by name, kept or found now; None: they cannot be found now. The repr of `question` tells questions
    apart."""
    machine = read_machine()
    if (kept := kept_times(question, names, machine)) is not None:
        return kept
    found = find()
    if found is not None:
        _keep(_note(question, machine), found)
    return found


# ── cache ──


def kept_times(question: object, candidates: Sequence[str], machine: Machine | None = None) -> Times | None:
    """Return an earlier answer; None: there is none for these candidates."""
    times = _read(_note(question, machine or read_machine()))
    return times if times is not None and list(times) == list(candidates) else None


def measurements_folder() -> Path:
    return cache_home() / "measured"


def forget_measurements() -> None:
    shutil.rmtree(measurements_folder(), ignore_errors=True)


def _note(question: object, machine: Machine) -> Path:
    key = hashlib.sha256(f"{machine} {question}".encode()).hexdigest()[:20]
    return measurements_folder() / f"{key}.json"


def _read(note: Path) -> Times | None:
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(note.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # nothing there, or damaged


def _keep(note: Path, times: Times) -> None:
    """Write a note. Without a writable cache nothing is kept, and the next start measures again."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(".new")
        fresh.write_text(json.dumps(times), encoding="utf-8")
        fresh.replace(note)
