"""Grammars of sequences on a device: their masks are computed on the host, and sent with the launch.

A sequence with a grammar takes part in a step only once its last token has landed and the mask for the next one is
there. A usual mask takes a hundredth of a step and is computed at once, while the outcome is emitted. A slow one is
left to a worker, which needs no Python while it computes: only its sequence waits, and the others fly on.

    draft         │ sure tokens, which the grammar alone allows │ other tokens
    draw after    │ can only be the next sure one               │ masked once │ not masked: checked when it has landed
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Offer, Rounds
from paceline.sampling.grammar import DEAD_END, WORKERS, look_together
from paceline.types import Finish, Verdict

MAX_WAIT_SECONDS = 0.02  # longest wait for a mask with nothing else to do; aborts and deadlines are served in between


class Masks:
    """The masks of running sequences, and of those that are being computed. One thread calls."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._pool = ThreadPoolExecutor(WORKERS, "grammar")  # starts threads when needed
        self._running: set[int] = set()  # keys of running sequences with grammars
        self._pending: dict[int, Future[np.ndarray | None]] = {}  # by sequence key

    def __len__(self) -> int:
        """Count the running sequences with grammars."""
        return len(self._running)

    def start(self, sequence: Sequence) -> None:
        """Begin a sequence that has got a lane."""
        if sequence.sampler.grammar is not None:
            self._running.add(sequence.key)
            sequence.sampler.grammar.beside = True
            self._ask(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._running.discard(sequence.key)
        self._pending.pop(sequence.key, None)

    def ask(self, sequences: Iterable[Sequence]) -> None:
        """Have the masks computed that the next step of these sequences needs."""
        for sequence in sequences if self._running else ():
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

    def write(self, works: Iterable[Work]) -> dict[int, Offer]:
        """Write the masks that a step needs to the device. Returns offers by sequence key: tokens that a grammar forces
        are the draft of its sequence. As far as they are sure, the mask is for the token behind them."""
        offers = {}
        for work in works if self._running else ():
            sequence, grammar = work.sequence, work.sequence.sampler.grammar
            if grammar is None or not work.samples:
                continue
            forced = grammar.forced(work.max_draft) if work.max_draft else ()
            work.forced, work.sure = bool(forced), grammar.sure(forced)
            mask = sequence.sampler.mask(forced[: work.sure])
            if mask is None:  # a dead end, which the text has not reached yet
                work.sure, mask = 0, sequence.sampler.mask()
            assert mask is not None, "a sequence without a mask is not ready"
            self._rounds.set_mask(sequence.lane, mask, sure=work.sure)
            if forced:
                offers[sequence.key] = Offer(len(sequence.tokens), forced)
        return offers

    def check(self, work: Work, verdict: Verdict, tokens: Seq[int]) -> Verdict:
        """Cut a verdict before the first of its new `tokens` that the grammar's mask would have changed. The device has
        gone on from there, so that its lane has to be written anew."""
        sequence = work.sequence
        if len(verdict.path) <= work.sure:
            return verdict
        count = sequence.sampler.count_masked(tokens, known=1 + work.sure)
        if count == len(tokens):
            return verdict
        sequence.in_flight.on_device = False
        return Verdict(path=verdict.path[: count - 1], token=tokens[count - 1])

    def look(self, works: Iterable[Work]) -> None:
        """Compute the masks behind the new tokens of all works at once, in parallel."""
        together = []
        for work in works if self._running else ():
            grammar = work.sequence.sampler.grammar
            if grammar is not None and work.verdict is not None:
                path = (*map(work.draft.tokens.__getitem__, work.verdict.path), work.verdict.token)
                together.append((grammar, path))
        if len(together) > 1:
            look_together(together)

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
