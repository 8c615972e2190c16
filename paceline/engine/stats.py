"""Statistics: counters of one running sequence, and totals of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.arms import ArmSpeed
from paceline.runner.rounds.protocol import Times
from paceline.types import Speedup


@dataclass(slots=True)
class Counters:
    """Mutable counters that become SequenceStats. Times are on the engine's clock."""

    submitted: float
    cached_tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    prediction_accepted: int = 0
    prediction_rejected: int = 0
    by_member: dict[str, tuple[int, int]] = field(default_factory=dict)
    preemptions: int = 0
    admitted: float | None = None  # time of the first admission
    first_token: float | None = None
    time_draft: float = 0.0
    time_verify: float = 0.0
    arm_speeds: dict[int, ArmSpeed] = field(default_factory=dict)  # by bits of the batch size less 1

    def count_admission(self, *, now: float) -> None:
        if self.admitted is None:  # keep the first admission: a preempted sequence is admitted again
            self.admitted = now

    def count_member(self, name: str, drafted: int, accepted: int) -> None:
        before = self.by_member.get(name, (0, 0))
        self.by_member[name] = before[0] + drafted, before[1] + accepted

    def count_step(self, drafted: int, accepted: int) -> None:
        self.steps += 1
        if drafted:
            self.rounds += 1
            self.drafted += drafted
            self.accepted += accepted
            counts = self.accepted_by_position
            if accepted > len(counts):
                counts += [0] * (accepted - len(counts))
            for position in range(accepted):
                counts[position] += 1


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine began. Times are seconds spent in each part of a step. If a device runs the step,
    draft, verify and accept times are the device's, which overlap with the host's."""

    steps: int = 0
    rows: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0
    wasted: int = 0  # parts of steps on a device whose sequence had already ended
    synthetic_acceptance: float = 0.0  # above 0: drafts were accepted at random, so texts are meaningless
    time_plan: float = 0.0  # planning and launching
    time_draft: float = 0.0
    time_verify: float = 0.0
    time_accept: float = 0.0
    time_emit: float = 0.0
    time_host: float = 0.0  # time of the host without forward passes, drafting and waiting
    time_wait: float = 0.0  # time in which the host only waited for a device

    def count_plan(self, seconds: float) -> None:
        """Add time in which the host planned and launched."""
        self.time_plan += seconds
        self.time_host += seconds

    def count_landing(self, times: Times, *, waited: float, lap: float, inside: bool) -> None:
        """Add a step that has landed. Landing, committing and emitting took `lap` seconds; the host `waited` for some.

        If the step ran `inside` its launch, its time was counted as planning, and is subtracted from it here."""
        self.steps += 1
        self.time_draft += times.draft
        self.time_verify += times.verify
        self.time_accept += times.accept
        self.time_emit += lap - waited
        self.time_host += lap - waited
        self.time_wait += waited
        if inside:
            self.time_plan -= times.draft + times.verify + times.accept
            self.time_host -= times.draft + times.verify


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of steps with one drafter, about as many sequences, and one kind of requests."""

    drafter: str
    batch: str  # sequences: 1, 2, 3-4, 5-8 …
    kind: str  # greedy, or sampled if tokens of a sequence are
    speedup: Speedup | None  # None: too few runs of plain steps
    runs: int  # of plain steps that count
    tokens_per_step: float | None  # of a sequence, speculative; None: not known
    acceptance: float | None  # accepted tokens a drafted one; None: nothing was drafted
    off: str | None  # why nothing is drafted; None: it may be


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured speed-up by speculation."""

    speedup: Speedup | None = None  # over all groups that draft, by the time of each; None: too little is known
    groups: tuple[Measured, ...] = ()
    steps: int = 0  # steps with a drafter, since the engine began
    drawn: int = 0  # steps that were drawn to run plain


@dataclass(frozen=True, slots=True)
class Prices:
    """Probabilities of being right from which drafting pays; 0: not known."""

    entry: float  # of drafting at all
    token: float  # of one more token


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Counts of a tenant's open sequences, and its virtual token counter (see `engine.fair_queue`)."""

    waiting: int  # sequences, with those that were preempted
    running: int
    counter: int  # weighted tokens; the smallest of those that wait is next


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's state between two steps."""

    engine: EngineStats = field(default_factory=EngineStats)  # a copy
    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages_total: int = 0
    drafters: Mapping[str, str | None] = field(default_factory=dict)  # drafter → why it is out of use; None: in use
    off_reasons: Mapping[str, int] = field(default_factory=dict)  # reason → running sequences that do not draft
    drafting: Mapping[str, int] = field(default_factory=dict)  # drafter → running sequences that draft with it
    measurement: Measurement | None = None  # None: the speed-up is not measured
    prices: Mapping[str, Prices] = field(default_factory=dict)  # by drafter
    tenants: Mapping[str, TenantLoad] = field(default_factory=dict)  # those with something open, and a few others
