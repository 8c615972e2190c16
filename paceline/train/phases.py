"""The phases of a training, as whoever shows its progress sees them."""

from __future__ import annotations

from typing import Protocol


class Phases(Protocol):
    def phase(self, doing: str, *, unit: str = "", total: int = 0, done: int = 0) -> None:
        """Begin the next phase. `unit`: what it counts; `total`: how many there are, 0 if that is not known; `done`:
        how many of them were done before."""

    def __call__(self, done: int, total: int) -> None:
        """Take how much of the phase is done, and of how much."""


class Unseen:
    """Phases that nobody shows."""

    def phase(self, doing: str, *, unit: str = "", total: int = 0, done: int = 0) -> None:
        pass

    def __call__(self, done: int, total: int) -> None:
        pass
