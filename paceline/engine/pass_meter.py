"""Seconds of passes over few rows, measured while the engine is idle, before traffic asks what a drafted token costs.

Each has passes over one row beside it, because other work changes the machine's speed from second to second:
`engine.row_seconds` says which of them count. Both run twice, and the quicker one counts: the first may be the first to
touch its memory. The rows follow a context of some length, because attention is a good part of their cost; what it
holds does not matter, and is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from paceline.engine.cost import CostModel
from paceline.engine.probe import Probes
from paceline.engine.row_seconds import MAX_ROWS
from paceline.kernels.base import Batch
from paceline.runner.batch import Share, build_batch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows of the measured passes; MAX_ROWS at most
TURNS = 4  # times that each number of rows is measured
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
                    shares = [Share(lane, start=context, count=count, outs=count) for count in (rows, 1)]
                    batches = [build_batch(probes.lanes, [share], features=False) for share in shares]
                    seconds, beside = (min(pair) for pair in zip(*map(self._timed, 2 * [batches]), strict=True))
                    self._cost.observe_rows(rows, beside if rows == 1 else seconds, beside=beside)
                yield True

    def _timed(self, batches: Sequence[Batch]) -> list[float]:
        """Run passes one after another, and return the seconds of each."""
        times = [self._clock()]
        for batch in batches:
            self._probes.forward(batch)
            times.append(self._clock())
        return [after - before for before, after in pairwise(times)]
