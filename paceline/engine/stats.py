"""Counting: what speculation did for a sequence while it ran, and for the engine as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """The mutable side of SequenceStats. Times are on the engine's clock."""

    submitted: float
    cached_tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    first_token: float | None = None
    time_draft: float = 0.0
    time_verify: float = 0.0

    def count_step(self, drafted: int, accepted: int, *, now: float) -> None:
        self.steps += 1
        if self.first_token is None:
            self.first_token = now
        if drafted:
            self.rounds += 1
            self.drafted += drafted
            self.accepted += accepted
            self.accepted_by_position += [0] * (accepted - len(self.accepted_by_position))
            for position in range(accepted):
                self.accepted_by_position[position] += 1


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine began. Times are seconds spent in each part of a step."""

    steps: int = 0
    rows: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0
    time_plan: float = 0.0
    time_draft: float = 0.0
    time_verify: float = 0.0
    time_accept: float = 0.0
    time_emit: float = 0.0

    @property
    def time_host(self) -> float:
        """Everything but forward passes and drafting."""
        return self.time_plan + self.time_accept + self.time_emit

    def count(self, clock: Sequence[float]) -> None:
        """A step, with the times between its parts: plan, draft, verify, accept, emit."""
        self.steps += 1
        self.time_plan += clock[1] - clock[0]
        self.time_draft += clock[2] - clock[1]
        self.time_verify += clock[3] - clock[2]
        self.time_accept += clock[4] - clock[3]
        self.time_emit += clock[5] - clock[4]
