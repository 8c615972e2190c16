"""Counting: what speculation did for a sequence while it ran, and for the engine as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.runner.rounds.protocol import Times


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
    prediction_accepted: int = 0
    prediction_rejected: int = 0
    preemptions: int = 0
    admitted: float | None = None  # for the first time
    first_token: float | None = None
    time_draft: float = 0.0
    time_verify: float = 0.0

    def count_admission(self, *, now: float) -> None:
        if self.admitted is None:  # not one that was preempted
            self.admitted = now

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
    """Totals since the engine began. Times are seconds spent in each part of a step; where a device runs it, `draft`,
    `verify` and `accept` are the device's, at the same time as the host's."""

    steps: int = 0
    rows: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0
    wasted: int = 0  # parts of steps on a device whose sequence had already ended
    synthetic_acceptance: float = 0.0  # above 0: drafts were accepted by a coin, and no text means anything
    time_plan: float = 0.0
    time_draft: float = 0.0
    time_verify: float = 0.0
    time_accept: float = 0.0
    time_emit: float = 0.0
    time_host: float = 0.0  # the host at work: everything but forward passes, drafting, and waiting
    time_wait: float = 0.0  # the host with nothing to do but wait for a device

    def count(self, plan: float, draft: float, verify: float, accept: float, emit: float) -> None:
        """A step on the host, with the seconds of its parts."""
        self.steps += 1
        self.time_plan += plan
        self.time_draft += draft
        self.time_verify += verify
        self.time_accept += accept
        self.time_emit += emit
        self.time_host += plan + accept + emit

    def count_launch(self, seconds: float) -> None:
        self.time_plan += seconds
        self.time_host += seconds

    def count_landing(self, times: Times, *, waited: float, seconds: float) -> None:
        """A step of a device has landed, which took the host `seconds` with the waiting."""
        self.steps += 1
        self.time_draft += times.draft
        self.time_verify += times.verify
        self.time_accept += times.accept
        self.time_emit += seconds - waited
        self.time_host += seconds - waited
        self.time_wait += waited


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps."""

    engine: EngineStats = field(default_factory=EngineStats)  # a copy
    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages_total: int = 0
    drafters: Mapping[str, str | None] = field(default_factory=dict)  # why one is out; None: it is in use
    off_reasons: Mapping[str, int] = field(default_factory=dict)  # of running sequences that do not draft now
