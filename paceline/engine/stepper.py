"""Steppers: what runs the steps that the engine plans, and hands back what became of them.

    host      plan 1 │ launch 1 ······ │ land 1 │ plan 2 │ launch 2 ······ │ land 2 │ …
    device    plan 1 │ launch 1 │ plan 2 │ launch 2 │ land 1 │ plan 3 │ launch 3 │ land 2 │ …

On the host (`engine.host`) a step is over when `launch` returns. On a device (`engine.device`) it stays in flight while
the engine plans the next one. The engine asks the same of both, and does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Output
from paceline.runner.rounds.protocol import Times


@dataclass(frozen=True, slots=True)
class Landing:
    """The outcome of one step: its works, now with drafts and verdicts, and what they cost."""

    works: list[Work]  # of sequences that still run
    times: Times  # a `step` of 0.0: the engine's own clock says how long the step took
    decodes: bool  # nothing but decoding, nothing wasted, and a time that is known: it tells what a step costs
    output: Output | None = None  # logits of the pass; None: they stayed on the device
    ended: list[Sequence] = field(default_factory=list)  # ended while in flight, and in no other step in flight
    wasted: int = 0  # works of sequences that had already ended
    waited: float = 0.0  # seconds in which the host did nothing but wait for the device
    inside: bool = False  # True: the step ran inside `launch`, on the host's own time


class Stepper(Protocol):
    """Runs steps: draft, verify, accept. Steps land in the order in which they were launched."""

    @property
    def in_flight(self) -> int:
        """Steps that were launched and have not landed."""

    def depth(self, running: Seq[Sequence]) -> int:
        """How many steps may be in flight while the next one, for these sequences, is planned."""

    def start(self, sequence: Sequence) -> None:
        """Take note of a sequence that has got a lane."""

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was preempted."""

    def knows(self, sequence: Sequence, page: int) -> bool:
        """Whether a page of the prefix cache serves this sequence as it is; if not, it is computed again."""

    def launch(self, plan: StepPlan) -> None:
        """Begin a step; one without works is none."""

    def land(self) -> Landing:
        """Wait for the oldest step in flight."""

    def observe(self, landing: Landing) -> None:
        """Tell drafters what became of their drafts, once all of the landing is committed and emitted."""

    def abandon(self, sequences: Seq[Sequence]) -> None:
        """Forget every step in flight, for all these sequences: the engine is dead."""
