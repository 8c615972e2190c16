"""Scale measured times so that the recorded traffic takes as long as it took: once, by one factor.

A served step takes longer than the same step of an idle engine: the server's event loop and its clients need the
machine, too, and the record may come from another machine. The record has the times of its answers. The setting that
was recorded is simulated, and the factor is changed until an output token takes as long as in the record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.replay.arrivals import Arrival, Schedule
from paceline.replay.simulate import Run, Setting, simulate

ANSWERS = 200  # that are simulated, from the first on
TURNS = 10  # simulations at most
NEAR = 0.01  # relative error at which the factor is good enough
FURTHEST = 4.0  # factor by which one turn changes it at most


@dataclass(frozen=True, slots=True)
class Calibration:
    scale: float
    source: str  # where the factor comes from, for people


def calibrate(settings: Sequence[Setting], schedule: Schedule) -> Calibration:
    """Find the factor with the setting that was recorded, if it is among these; otherwise 1, and say why."""
    arrivals = schedule.arrivals[:ANSWERS]
    wanted = recorded_pace(arrivals)
    if schedule.changed:
        return Calibration(1.0, "not calibrated: arrival times or lengths are not those of the record")
    if wanted is None:
        return Calibration(1.0, "not calibrated: the record has no times of its answers")
    drafters = {str(arrival.answer.stats.get("drafter") or "") for arrival in arrivals}
    names = {setting.drafter.name if setting.drafter is not None else "": setting for setting in settings}
    if len(drafters) != 1 or not drafters <= set(names):
        said = " and ".join(sorted(name or "no drafter" for name in drafters))
        return Calibration(1.0, f"not calibrated: the record was made with {said}, which is not simulated")
    chosen = replace(names[drafters.pop()], stream_interval=0.0)  # the record has times of tokens, not of chunks
    scale = _fitted(chosen, arrivals, wanted)
    return Calibration(scale, f"scaled by {scale:.3f}: {chosen.name} then takes as long per token as in the record")


def _fitted(setting: Setting, arrivals: Sequence[Arrival], wanted: float) -> float:
    """Find the scale by bisection: the pace grows with it, slowly on an idle machine and fast near its limit."""
    scale, low, high = 1.0, 0.0, math.inf
    for _ in range(TURNS):
        run = simulate(replace(setting, times=setting.times.scaled(scale)), arrivals)
        if run.interrupted:
            raise KeyboardInterrupt
        ratio = wanted / simulated_pace(run)
        if abs(ratio - 1) < NEAR:
            break
        low, high = (scale, high) if ratio > 1 else (low, scale)
        within = low and high < math.inf
        scale = math.sqrt(low * high) if within else scale * min(max(ratio, 1 / FURTHEST), FURTHEST)
    return scale


def recorded_pace(arrivals: Sequence[Arrival]) -> float | None:
    """Return the usual seconds of a token after the first, over the recorded answers; None: not recorded."""
    paces = []
    for arrival in arrivals:
        stats, length = arrival.answer.stats, arrival.answer.length
        if "time_total" not in stats or "time_to_first" not in stats:
            return None
        if length > 1:
            paces.append((stats["time_total"] - stats["time_to_first"]) / (length - 1))
    return _middle(paces) or None


def simulated_pace(run: Run) -> float:
    return _middle([each.tpot for each in run.outcomes if each.tpot is not None]) or math.inf


def _middle(values: Sequence[float]) -> float:
    """Mean of the middle half: as robust as the median, and smoother in the scale."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return sum(middle) / len(middle) if middle else 0.0
