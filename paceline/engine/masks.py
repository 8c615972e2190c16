"""Masks of grammars for sequences on a device: computed on the host, beside the device and beside the engine.

A sequence with a grammar takes part in a step only once the mask for its next token is there. A usual mask takes a
hundredth of a step and is computed at once, while the outcome is emitted. A slow one is left to a worker, which needs
no Python while it computes: only its sequence waits, and the others fly on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from paceline.engine.sequence import Sequence
from paceline.sampling.grammar import DEAD_END
from paceline.types import Finish

MAX_WAIT_SECONDS = 0.02  # longest wait for a mask with nothing else to do; aborts and deadlines are served in between


class Masks:
    """The masks that are being computed. One thread calls."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "grammar")  # starts threads when needed
        self._pending: dict[int, Future[np.ndarray | None]] = {}  # by sequence key

    def start(self, sequence: Sequence) -> None:
        """Begin a sequence that has got a lane."""
        if sequence.sampler.grammar is not None:
            sequence.sampler.grammar.beside = True
            self._ask(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._pending.pop(sequence.key, None)

    def ask(self, sequences: Iterable[Sequence]) -> None:
        """Have the masks computed that the next step of these sequences needs."""
        for sequence in sequences:
            if sequence.sampler.grammar is not None and sequence.finish is None:
                self._ask(sequence)

    def has(self, sequence: Sequence) -> bool:
        """Return True if the mask for the sequence's next token is there. A mask from a worker may also say that the
        sequence has ended: then its `finish` is set, and it never has a mask again."""
        pending = self._pending.get(sequence.key)
        if pending is None:
            return sequence.finish is None
        if not pending.done():
            return False
        del self._pending[sequence.key]
        error = pending.exception()
        sequence.finish, sequence.error = _end(sequence) if error is None else (Finish.ERROR, str(error))
        return sequence.finish is None

    def wait(self) -> None:
        """Wait until the first mask is there, or for `MAX_WAIT_SECONDS`."""
        if self._pending:
            wait(self._pending.values(), timeout=MAX_WAIT_SECONDS, return_when=FIRST_COMPLETED)

    def _ask(self, sequence: Sequence) -> None:
        grammar = sequence.sampler.grammar
        assert grammar is not None, "a mask without a grammar"
        if not grammar.looked:
            self._pending[sequence.key] = self._pool.submit(grammar.mask)


def _end(sequence: Sequence) -> tuple[Finish | None, str | None]:
    """Return why a sequence ends where it is, by the mask for its next token, and the error if there is one."""
    grammar = sequence.sampler.grammar
    assert grammar is not None, "a mask without a grammar"
    mask = grammar.mask()
    if mask is None:
        return Finish.ERROR, DEAD_END
    return (None if grammar.goes_on(mask) else Finish.STOP), None
