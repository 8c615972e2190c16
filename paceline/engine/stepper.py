"""Steppers run the steps that the engine plans, and return their outcomes as landings.

    host      plan 1 │ launch 1 ······ │ land 1 │ plan 2 │ launch 2 ······ │ land 2 │ …
    device    plan 1 │ launch 1 │ plan 2 │ launch 2 │ land 1 │ plan 3 │ launch 3 │ land 2 │ …

On the host (`engine.host`) a step is complete when `launch` returns. On a device (`engine.device`) it stays in flight
while the engine plans the next one. The engine uses both through one protocol, and does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from paceline.engine.group import Side
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Output
from paceline.runner.rounds.protocol import Times


class Landing(NamedTuple):
    """The outcome of one step: its works, now with drafts and verdicts, and the time they took.

    A tuple with names, because every step makes one: a frozen dataclass takes several times as long."""

    works: list[Work]  # works of sequences that still run
    times: Times  # if `step` is 0.0, the engine's own clock measures the step
    decodes: bool  # only decoding, no wasted work, times known: the cost model learns from it
    output: Output | None = None  # logits of the pass; None: they stayed on the device
    ended: Seq[Sequence] = ()  # sequences that ended, and have no other step in flight
    wasted: int = 0  # works of sequences that had already ended
    waited: float = 0.0  # seconds in which the host did nothing but wait for the device
    inside: bool = False  # True: the step ran inside `launch`, on the host's own time
    crowded: bool = False  # too many sequences ran for any to draft
    side: Side | None = None  # side of the measured speed-up on which the step counts; None: neither
    drafting: Mapping[str, float] = {}  # seconds of each drafter's call on the host, part of `times.draft`


class Stepper(Protocol):
    """Runs steps: draft, verify, accept. Steps land in the order in which they were launched."""

    @property
    def in_flight(self) -> int:
        """Steps that were launched and have not landed."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight while the next one is planned."""

    def start(self, sequence: Sequence) -> None:
        """Begin a sequence that has got a lane."""

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was preempted."""

    def knows(self, sequence: Sequence, page: int) -> bool:
        """Return whether this sequence can use a page of the prefix cache; if not, the page is computed again."""

    def ready(self, sequence: Sequence) -> bool:
        """Return whether a running sequence that draws with masks can take part in the next step; if not, the others
        go on.

        May set `finish` of a sequence that turns out to be complete, or cannot go on."""

    def launch(self, plan: StepPlan) -> None:
        """Begin a step. A plan without works launches nothing: if nothing is in flight either, wait a moment for a
        sequence to become ready."""

    def land(self) -> Landing:
        """Wait for the oldest step in flight, and return its outcome."""

    def observe(self, landing: Landing) -> None:
        """Report acceptance and hidden states to the drafters, once the whole landing is committed and emitted."""

    def improve(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""

    def abandon(self, sequences: Seq[Sequence]) -> None:
        """Forget every step in flight, and reset these sequences: the engine is dead."""
