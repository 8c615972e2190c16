"""Scale measured times so that the recorded traffic takes as long as it took, by two factors for all settings.

A served step takes longer than the same step of an idle engine: the server's event loop and its clients need the
machine, too, and the record may come from another machine. The record has the times of its answers. The setting that
was recorded is simulated. One factor is changed until an output token takes as long as in the record, and another one,
of reading prompts alone, until the first token does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from paceline.replay.arrivals import Arrival, Schedule
from paceline.replay.simulate import Setting, simulate

ANSWERS = 200  # that are simulated
WINDOWS = 4  # stretches of the record that they come from: other work on the machine may have slowed one of them
TURNS = 8  # simulations for a factor, at most
ROUNDS = 2  # times that both factors are found in turn, because each also changes what the other is found by
NEAR = 0.02  # relative error at which the factor is good enough
FURTHEST = 4.0  # factor by which one turn changes it at most


@dataclass(frozen=True, slots=True)
class Calibration:
    scale: float  # of all times
    reading: float  # of reading prompts, on top
    source: str  # where the factor comes from, for people


class Pace(NamedTuple):
    """Seconds that answers usually take."""

    first: float  # to the first token
    token: float  # of each further one


def calibrate(settings: Sequence[Setting], schedule: Schedule) -> Calibration:
    """Find the factors with the setting that was recorded, if it is among these; otherwise 1, and say why."""
    windows = stretches(schedule.arrivals)
    arrivals = [arrival for window in windows for arrival in window]
    wanted = recorded_pace(arrivals)
    if schedule.changed:
        return Calibration(1.0, 1.0, "not calibrated: arrival times or lengths are not those of the record")
    if wanted is None:
        return Calibration(1.0, 1.0, "not calibrated: the record has no times of its answers")
    drafters = {str(arrival.answer.stats.get("drafter") or "") for arrival in arrivals}
    names = {setting.drafter.name if setting.drafter is not None else "": setting for setting in settings}
    if len(drafters) != 1 or not drafters <= set(names):
        said = " and ".join(sorted(name or "no drafter" for name in drafters))
        return Calibration(1.0, 1.0, f"not calibrated: the record was made with {said}, which is not simulated")
    # What is compared are times of the engine: of tokens, not of chunks, and without the server.
    chosen = replace(names[drafters.pop()], stream_interval=0.0, delivery=0.0)
    scale, reading = _fitted(chosen, windows, wanted)
    said = f"scaled by {scale:.3f}, of reading prompts by {reading:.3f} more"
    return Calibration(scale, reading, f"{said}: {chosen.name} then takes as long as in the record")


def stretches(arrivals: Sequence[Arrival]) -> list[Sequence[Arrival]]:
    """Choose ANSWERS arrivals in WINDOWS stretches, from the beginning of the record to its end; all of a short one."""
    size, last = ANSWERS // WINDOWS, len(arrivals) - ANSWERS // WINDOWS
    if len(arrivals) <= ANSWERS:
        return [arrivals]
    starts = [last * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return [arrivals[start : start + size] for start in starts]


def _fitted(setting: Setting, windows: Sequence[Sequence[Arrival]], wanted: Pace) -> tuple[float, float]:
    def pace(scale: float, reading: float) -> Pace:
        scaled = replace(setting, times=setting.times.scaled(scale, reading=reading))
        runs = [simulate(scaled, window) for window in windows]
        if any(run.interrupted for run in runs):
            raise KeyboardInterrupt
        return _pace([(each.ttft, each.tpot) for run in runs for each in run.outcomes])

    scale = reading = 1.0
    for _ in range(ROUNDS):
        scale = _bisected(partial(lambda own, factor: pace(factor, own).token, reading), wanted.token, first=scale)
        reading = _bisected(partial(lambda own, factor: pace(own, factor).first, scale), wanted.first, first=reading)
    return scale, reading


def _bisected(seconds: Callable[[float], float], wanted: float, *, first: float) -> float:
    """Find the factor with which something takes the `wanted` seconds: they grow with it, slowly on an idle machine and
    fast near its limit."""
    factor, low, high = first, 0.0, math.inf
    for _ in range(TURNS):
        ratio = wanted / seconds(factor)
        if abs(ratio - 1) < NEAR:
            break
        low, high = (factor, high) if ratio > 1 else (low, factor)
        within = low and high < math.inf
        factor = math.sqrt(low * high) if within else factor * min(max(ratio, 1 / FURTHEST), FURTHEST)
    return factor


def recorded_pace(arrivals: Sequence[Arrival]) -> Pace | None:
    """Return what answers usually took in the record; None: it does not say."""
    times = []
    for arrival in arrivals:
        stats, length = arrival.answer.stats, arrival.answer.length
        if "time_total" not in stats or "time_to_first" not in stats:
            return None
        after = stats["time_total"] - stats["time_to_first"]
        times.append((stats["time_to_first"], after / (length - 1) if length > 1 else None))
    found = _pace(times)
    return found if 0 < found.token < math.inf and found.first > 0 else None


def _pace(times: Sequence[tuple[float, float | None]]) -> Pace:
    return Pace(_middle([first for first, _ in times]), _middle([token for _, token in times if token is not None]))


def _middle(values: Sequence[float]) -> float:
    """Mean of the middle half: as robust as the median, and smoother in a factor. Infinite without values."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return sum(middle) / len(middle) if middle else math.inf
