"""Accounting of the engine's time, and of a step's outcome: counters, statistics, the governor's cost model.

A step is marked when it begins, when planning and launching end, and when a landing is emitted. The time between two
marks belongs to one part of `EngineStats`, so that no time is counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.arm_times import charge_arms, has_arms
from paceline.engine.governor import Governor
from paceline.engine.scheduler import Work
from paceline.engine.stats import EngineStats
from paceline.engine.stepper import Landing
from paceline.engine.targets import lateness


class Accounting:
    def __init__(self, stats: EngineStats, governor: Governor, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._governor = governor
        self._clock = clock
        self._began = 0.0  # time at which the engine's step began
        self._mark = 0.0  # time of the latest mark: everything before it is accounted for
        self._measured = 0.0  # time until which the latest landing was measured
        self._rows = 0  # rows of the landing that was charged last
        self._sequences = self._accepted = 0  # sequences with new tokens, and accepted tokens, of that landing
        # Time at which the landing before was emitted, while the device ran another step; None: it was idle since.
        self._landed: float | None = None

    def begin(self) -> float:
        """Begin a step of the engine; returns the time."""
        self._began = self._mark = self._clock()
        return self._began

    def planned(self) -> None:
        """Charge the time since the last mark to planning and launching."""
        before, self._mark = self._mark, self._clock()
        self._stats.count_plan(self._mark - before)

    def charge(self, landing: Landing) -> None:
        """Divide the draft and verification time of a step among its sequences, in proportion to their rows."""
        rows = 0
        for work in landing.works:
            rows += work.count + work.drafted
        for work in landing.works:
            counters, share = work.sequence.counters, (work.count + work.drafted) / rows
            counters.time_draft += landing.times.draft * share
            counters.time_verify += landing.times.verify * share
        self._rows = rows
        self._stats.rows += rows

    def measure(self, landing: Landing, *, busy: bool) -> None:
        """Count a landing on its side of the measured speed-up, before drafters hear of it. `busy`: a device runs
        another step already.

        On the host a step takes from its beginning to here, and what drafters do with it follows in `emitted`. On a
        device it takes from one landing to the next."""
        began = self._began if landing.inside else self._landed
        now = self._clock()
        self._landed = now if busy else None
        sequences, accepted = 0, 0
        for work in landing.works:
            if work.verdict is not None:
                sequences, accepted = sequences + 1, accepted + len(work.verdict.path)
        self._sequences, self._accepted, self._measured = sequences, accepted, now
        if landing.side is not None and began is not None and not landing.wasted and landing.times.typical:
            landing.side.add(
                sequences=sequences, accepted=accepted, drafted=self._rows - sequences, seconds=now - began
            )

    def emitted(self, landing: Landing) -> None:
        """Count a landing that was charged, emitted and observed, and teach the cost model if the step only decoded."""
        before, self._mark, times = self._mark, self._clock(), landing.times
        if landing.side is not None and landing.inside:
            landing.side.group.speculative.seconds += self._mark - self._measured
        self._stats.count_landing(times, waited=landing.waited, lap=self._mark - before, inside=landing.inside)
        self._stats.wasted += landing.wasted
        if landing.decodes:
            if has_arms(landing.works):
                self._charge_arms(landing)
            self._governor.cost.observe(
                sequences=self._sequences,
                rows=self._rows,
                tokens=self._sequences + self._accepted,
                pass_seconds=times.verify,
                step_seconds=times.step or self._mark - self._began,
                draft_seconds=times.draft,
            )

    def _charge_arms(self, landing: Landing) -> None:
        """Charge the step to the arms of a canary. On a device, sequences that drafted share its time of drafting."""
        seconds, times = landing.times.step or self._mark - self._began, landing.times
        drafting = landing.drafting or ({} if landing.inside else _drafted_together(landing.works, times.draft))
        charge_arms(landing.works, seconds, drafting, row_seconds=self._governor.cost.row_seconds)

    def count_tokens(self, work: Work, kept: int) -> None:
        """Count the drafted, accepted and `kept` tokens of a work, and report the acceptance to the governor.

        Right tokens behind the end of the answer count neither as drafted nor as accepted: nobody gets them."""
        assert work.verdict is not None
        sequence, drafted, accepted = work.sequence, work.drafted, len(work.verdict.path)
        if accepted > kept:
            drafted, accepted = drafted - (accepted - kept), kept
        counters, stats = sequence.counters, self._stats
        if counters.first_token is None:
            counters.first_token = self._clock()
        target = sequence.request.speculation.target_tpot
        if target is not None:
            sequence.lateness = lateness(sequence, target=target, now=self._clock())
            self._governor.knows_late = True
        counters.count_step(drafted, accepted)
        member = work.member or work.draft.by
        if member is not None:
            counters.count_member(member, drafted, accepted)
        stats.output_tokens += kept
        stats.drafted += drafted
        stats.accepted += accepted
        if (drafted or work.max_draft) and not work.forced and sequence.finish is None:
            if not work.max_copy or (work.by_network and not work.copied):
                self._governor.learn(sequence, drafter=work.drafter, drafted=work.depth, accepted=accepted)
            elif work.by_network:  # a copy says nothing of the network whose place it took
                self._governor.tell(work.drafter)
        if work.predicted:
            counters.prediction_accepted += accepted
            counters.prediction_rejected += drafted - accepted


def _drafted_together(works: Seq[Work], seconds: float) -> dict[str, float]:
    """Divide the seconds that a device drafted among the drafters of a step, by their sequences."""
    names = Counter(work.drafter for work in works if work.drafter is not None and work.max_draft)
    return {name: seconds * count / names.total() for name, count in names.items()}
