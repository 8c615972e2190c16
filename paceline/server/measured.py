"""The measured speed-up as the server tells it: the fields of /v1/speculation, and a line in the log where the engine
turns drafting off or on for everybody."""

from __future__ import annotations

from typing import Any

from paceline.engine.ratio import MIN_BLOCKS
from paceline.engine.stats import Measured, Measurement, Snapshot
from paceline.engine.truth import NOT_MEASURED
from paceline.server import logs
from paceline.server.protocol.answers import GroupSpeedup, MeasuredSpeedup
from paceline.types import Speedup

QUIET_SECONDS = 5.0  # time between two lines about decisions; what happens in between is told with the next line


def shown(found: Speedup | None) -> MeasuredSpeedup | None:
    return None if found is None else MeasuredSpeedup(**found._asdict())


def measured_fields(now: Snapshot) -> dict[str, Any]:
    """Return the fields of /v1/speculation about the measured speed-up."""
    found = now.measurement or Measurement()
    return {
        "speedup": shown(found.speedup),
        "speedup_note": note_of(now.measurement),
        "speedups": [_group(group) for group in found.groups],
        "drawn_steps": found.drawn,
        "drawn_share": found.drawn / found.steps if found.steps else 0.0,
    }


def note_of(measurement: Measurement | None) -> str | None:
    """Say why there is no speed-up over all; None: there is one."""
    if measurement is None:
        return NOT_MEASURED[1]
    if measurement.speedup is not None:
        return None
    runs = max((group.runs for group in measurement.groups if group.off is None), default=0)
    if not runs and any(group.off for group in measurement.groups):
        return "speculation is off: it was measured, or is expected, to be slower than plain decoding"
    return f"measuring: {runs} of {MIN_BLOCKS} runs of plain steps so far"


def _group(group: Measured) -> GroupSpeedup:
    return GroupSpeedup(
        drafter=group.drafter,
        batch=group.batch,
        kind=group.kind,
        speedup=shown(group.speedup),
        runs=group.runs,
        tokens_per_step=group.tokens_per_step,
        acceptance=group.acceptance,
        off=group.off,
    )


class Decisions:
    """Writes a line where the guard of a drafter, batch size and kind has turned on or off, some seconds apart."""

    def __init__(self) -> None:
        self._off: dict[tuple[str, str, str], bool] = {}  # (drafter, batch, kind) → off, as last told
        self._told_at = -QUIET_SECONDS

    def look(self, now: Snapshot, *, at: float) -> None:
        """Compare a snapshot with what was told; `at`: its time in seconds."""
        if now.measurement is None or at - self._told_at < QUIET_SECONDS:
            return
        for group in now.measurement.groups:
            key, off = (group.drafter, group.batch, group.kind), group.off is not None
            if off != self._off.get(key, False):
                self._off[key], self._told_at = off, at
                said = "speculation off" if off else "speculation on again"
                reason = group.off or "trial after a rest"
                logs.say(said, drafter=group.drafter, batch=group.batch, kind=group.kind, reason=reason)
                return
