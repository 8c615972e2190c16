"""How far a drafter on the device has read each sequence: it can only draft for what it knows.

    committed      0 .................. L-2  L-1 │
    in step        0 ........ s-1                │      may draft if s >= L - 2: the first pass reads the last two

A step that drafts leaves the drafter in step. Plain ones, a prompt whose pages came from the prefix cache, and steps
on the host do not; what is missing is then read as chunks of its own. The drafter keeps its keys and values under the
target's page ids, so a page from the prefix cache may hold them already: its epoch tells.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.engine.sequence import Sequence
from paceline.kernels.base import PAGE_SIZE
from paceline.kv.pages import PageMarks, PagePool


class Reading:
    def __init__(self, readers: Collection[str], pool: PagePool) -> None:
        self._filled = {name: PageMarks(pool) for name in readers}  # pages that were read as a whole

    def enter(self, sequence: Sequence) -> None:
        """A sequence got its lane: some of its pages may have been read for another."""
        filled, span = self._filled.get(self._reader(sequence)), sequence.span
        assert span is not None
        known = 0 if filled is None else filled.leading(span.pages)
        sequence.in_flight.filled, sequence.in_flight.in_step = known, known * PAGE_SIZE

    def reach(self, sequence: Sequence, position: int) -> None:
        """Everything before `position` has been read, or will have been by the time the next launch begins."""
        state, span, filled = sequence.in_flight, sequence.span, self._filled[self._reader(sequence)]
        assert span is not None
        state.in_step = max(state.in_step, position)
        filled.add(span.pages[state.filled : state.in_step // PAGE_SIZE])
        state.filled = max(state.filled, state.in_step // PAGE_SIZE)

    def _reader(self, sequence: Sequence) -> str:
        """Whichever of its drafters reads: at most one does, though another may draft at the moment."""
        return next((name for name in sequence.drafters if name in self._filled), "")

    def missing(self, sequence: Sequence) -> range | None:
        """Positions to be read before the next launch can draft; None: not known while a draft is in flight."""
        state = sequence.in_flight
        if state.most > state.least:
            return range(0) if state.drafts else None
        return range(state.in_step, len(sequence.tokens) + state.least - 2)
