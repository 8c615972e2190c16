"""Accounting of the engine's time, and of a step's outcome: counters, statistics, the governor's cost model.

A step is marked when it begins, when planning and launching end, and when a landing is emitted. The time between two
marks belongs to one part of `EngineStats`, so that no time is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.governor import Governor
from paceline.engine.scheduler import Work
from paceline.engine.stats import EngineStats
from paceline.engine.stepper import Landing


class Accounting:
    def __init__(self, stats: EngineStats, governor: Governor, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._governor = governor
        self._clock = clock
        self._began = 0.0  # time at which the engine's step began
        self._mark = 0.0  # time of the latest mark: everything before it is accounted for
        self._rows = 0  # rows of the landing that was charged last

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

    def emitted(self, landing: Landing) -> None:
        """Count a landing that was charged and emitted, and teach the cost model if the step only decoded."""
        before, self._mark, times = self._mark, self._clock(), landing.times
        self._stats.count_landing(times, waited=landing.waited, lap=self._mark - before, inside=landing.inside)
        self._stats.wasted += landing.wasted
        if landing.decodes:
            sequences, accepted = 0, 0
            for work in landing.works:
                if work.verdict is not None:
                    sequences, accepted = sequences + 1, accepted + len(work.verdict.path)
            self._governor.cost.observe(
                sequences=sequences,
                rows=self._rows,
                tokens=sequences + accepted,
                pass_seconds=times.verify,
                step_seconds=times.step or self._mark - self._began,
                draft_seconds=times.draft,
            )

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
        counters.count_step(drafted, accepted)
        if work.draft.by is not None:
            counters.count_member(work.draft.by, drafted, accepted)
        stats.output_tokens += kept
        stats.drafted += drafted
        stats.accepted += accepted
        if (drafted or work.max_draft) and not work.forced and sequence.finish is None:
            self._governor.learn(sequence, drafter=work.drafter, drafted=work.depth, accepted=accepted)
        if work.predicted:
            counters.prediction_accepted += accepted
            counters.prediction_rejected += drafted - accepted
