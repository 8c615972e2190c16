"""Where the time of the engine goes, and what was learnt from a step: counters, statistics, the governor's cost model.

The clock is read at three places of a step: when it begins, when planning and launching end, when a landing is emitted.
What passes between two of them belongs to one part of `EngineStats`, so that nothing is counted twice.
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
        self._began = 0.0  # of the engine's step
        self._mark = 0.0  # until here time is accounted for
        self._rows = 0  # of the landing that was charged last

    def begin(self) -> float:
        """Begin a step of the engine; returns the time."""
        self._began = self._mark = self._clock()
        return self._began

    def planned(self) -> None:
        """Charge the time since the last mark to planning and launching."""
        self._stats.count_plan(self._lap())

    def charge(self, landing: Landing) -> None:
        """Share the time of a step among its sequences, by rows."""
        draft, verify = landing.times.draft, landing.times.verify
        rows = sum([work.rows for work in landing.works])
        for work in landing.works:
            share, counters = work.rows / rows, work.sequence.counters
            counters.time_draft += draft * share
            counters.time_verify += verify * share
        self._rows = rows
        self._stats.rows += rows

    def emitted(self, landing: Landing) -> None:
        """Count a landing whose time is charged and whose tokens are emitted, and learn what such a step costs."""
        lap, times = self._lap(), landing.times
        self._stats.count_landing(times, waited=landing.waited, lap=lap, inside=landing.inside)
        self._stats.wasted += landing.wasted
        if landing.decodes:
            drawn = [work.verdict for work in landing.works if work.verdict is not None]
            self._governor.cost.observe(
                sequences=len(drawn),
                rows=self._rows,
                tokens=len(drawn) + sum([len(verdict.path) for verdict in drawn]),
                pass_seconds=times.verify,
                step_seconds=times.step or self._mark - self._began,
                draft_seconds=times.draft,
            )

    def count_tokens(self, work: Work, kept: int) -> None:
        """Count what came of a work of which `kept` tokens stay, and tell the governor."""
        assert work.verdict is not None
        sequence, drafted, accepted = work.sequence, len(work.draft.tokens), len(work.verdict.path)
        sequence.counters.count_step(drafted, accepted, now=self._clock())
        self._stats.output_tokens += kept
        self._stats.drafted += drafted
        self._stats.accepted += accepted
        if drafted and not work.forced and sequence.finish is None:
            self._governor.learn(sequence, drafter=work.drafter, drafted=work.draft.depth, accepted=accepted)
        if work.drafter in sequence.predictors and not work.forced:
            sequence.counters.prediction_accepted += min(accepted, kept)
            sequence.counters.prediction_rejected += drafted - accepted

    def _lap(self) -> float:
        before, self._mark = self._mark, self._clock()
        return self._mark - before
