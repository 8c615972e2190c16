"""The choice between two ways of running steps that some sequences must see the end of before they go on.

    overlap      plan 2 during 1 │ plan 3 during 2 │ …      sequences that wait take part in every second step
    no overlap   1 │ plan 2 │ 2 │ plan 3 │ 3 │ …            the device is idle while the host plans

Overlap loses half of the tokens of the sequences that wait; without it the host's part of the time is lost.
"""

from __future__ import annotations

DECAY = 0.9  # weight of the past in running averages
USUAL_LOSS = 0.25  # share of a step's time that is lost without overlap, until it is measured


class Overlap:
    """Measures how long a step takes on the device, and how long the host is busy between two steps."""

    def __init__(self) -> None:
        self._step = 0.0  # seconds
        self._host = 0.0  # seconds
        self._since: float | None = None  # time at which the last step landed; None: nothing was left to do

    def landed(self, now: float, step_seconds: float) -> None:
        """Count a step that has landed; 0.0 seconds: not known."""
        self._since = now
        self._step = _average(self._step, step_seconds)

    def idle(self) -> None:
        """Forget the time since the last landing: no sequence goes on."""
        self._since = None

    def launched(self, now: float) -> None:
        """Count the host's time from the last landing to this launch."""
        if self._since is not None:
            self._host = _average(self._host, now - self._since)
            self._since = None

    def pays(self, waiting: float) -> bool:
        """Return True if more tokens a second come with overlap, when this share of the sequences waits."""
        known = self._step and self._host
        loss = self._host / (self._step + self._host) if known else USUAL_LOSS
        return waiting / 2 <= loss


def _average(before: float, seconds: float) -> float:
    return seconds + DECAY * (before - seconds) if before and seconds else before or seconds
