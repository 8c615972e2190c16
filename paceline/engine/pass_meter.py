"""Seconds of passes over few rows, measured while the engine is idle, before traffic asks what a drafted token costs.

Passes over each number of rows take turns, so that a change of the machine's speed meets all of them. Each runs twice,
and the second one counts: the first may be the first to touch its memory. The rows follow a context of some length,
because attention is a good part of their cost; what it holds does not matter, and is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.engine.cost import CostModel
from paceline.engine.probe import Probes
from paceline.engine.row_seconds import MAX_ROWS
from paceline.runner.batch import Share, build_batch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows of the measured passes; MAX_ROWS at most
TURNS = 3  # times that each number of rows is measured
CONTEXT = 256  # tokens before the rows, if the engine has room for so many
assert max(ROWS) <= MAX_ROWS


class PassMeter:
    def __init__(self, probes: Probes, cost: CostModel, clock: Callable[[], float]) -> None:
        self._probes = probes
        self._cost = cost
        self._clock = clock
        self._left = self._passes()

    def improve(self) -> bool:
        """Measure passes over one number of rows. False: all were measured. The engine must be idle."""
        return next(self._left, False)

    def _passes(self) -> Iterator[bool]:
        probes = self._probes
        most = min(probes.admission.max_context // 2, probes.max_step_tokens)
        context = min(CONTEXT, probes.admission.max_context // 2)
        for _ in range(TURNS):
            for rows in (rows for rows in ROWS if rows <= most):
                with probes.seated([0] * (context + rows)) as lane:
                    share = Share(lane, start=context, count=rows, outs=rows)
                    batch = build_batch(probes.lanes, [share], features=False)
                    probes.forward(batch)
                    began = self._clock()
                    probes.forward(batch)
                    self._cost.observe_rows(rows, self._clock() - began)
                yield True
