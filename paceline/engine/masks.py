"""Grammars of sequences on a device: which rounds draw with masks (`engine.caution`), and these masks. Tokens of other
rounds are checked when they have landed.

The host computes masks while the device verifies. The pass of a step needs the tokens of the step before, which the
device has; only drawing needs the masks. So a step with masks flies like any other, and `draw` brings those of all its
rows, also behind drafted tokens.

    host      collect 1, emit │ masks of 2 │ draw 2 │ plan and launch 3 │ collect 2, emit │ masks of 3 │ …
    device    draft and verify 2 ··················│ draw 2 │ draft and verify 3 ················· │ draw 3

A usual mask takes a hundredth of a step; those of a step are computed one after the other. A grammar with slow masks
takes part in such a step only once its last token has landed and a worker has computed the mask. If a mask is missing
when the others are there, its sequence draws nothing in this step; nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from paceline.engine.caution import caution_for
from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Offer, Rounds, Ticket
from paceline.sampling.grammar_state import DEAD_END, WORKERS, GrammarState, Outlook
from paceline.types import Finish

ENDS = {Outlook.END: (Finish.STOP, None), Outlook.NOTHING: (Finish.ERROR, DEAD_END)}  # others do not end a sequence
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
            sequence.caution = caution_for(filters=sequence.sampler.filters, rule=sequence.request.speculation.rule)
            self._ask(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._running.discard(sequence.key)
        self._pending.pop(sequence.key, None)

    def ask(self, landed: Iterable[Work]) -> None:
        """Leave the next masks of sequences whose grammars are slow to workers."""
        for work in landed if self._running else ():
            sequence, caution = work.sequence, work.sequence.caution
            if caution is not None and caution.rounds and sequence.finish is None and _grammar(sequence).slow:
                self._ask(sequence)

    def ready(self, sequence: Sequence) -> bool:
        """Return True if a sequence that draws with masks can take part in the next step. With a token in flight, its
        mask must be quick. A mask from a worker may also say that the sequence has ended: then its `finish` is set."""
        return not _grammar(sequence).slow if sequence.in_flight.least else self.has(sequence)

    def has(self, sequence: Sequence) -> bool:
        """Return True if no worker computes the mask for the sequence's next token. One that has done so may find that
        the sequence has ended: then its `finish` is set, and it never has a mask again."""
        pending = self._pending.get(sequence.key)
        if pending is None:
            return sequence.finish is None
        if not pending.done():
            return False
        del self._pending[sequence.key]
        error = pending.exception()
        if error is not None:
            sequence.finish, sequence.error = Finish.ERROR, str(error)
            return False
        return self._goes_on(sequence, _grammar(sequence).outlook())

    def wait(self) -> None:
        """Wait until the first mask is there, or for `MAX_WAIT_SECONDS`."""
        if self._pending:
            wait(self._pending.values(), timeout=MAX_WAIT_SECONDS, return_when=FIRST_COMPLETED)

    def offers(self, works: Iterable[Work]) -> dict[int, Offer]:
        """Return, by sequence key, the tokens that grammars force as offers. They begin behind the last known token, so
        that some are left behind those in flight."""
        offers = {}
        for work in works if self._running else ():
            sequence, grammar = work.sequence, work.sequence.sampler.grammar
            if grammar is None or not grammar.forced or not work.samples or not work.max_draft:
                continue
            most = sequence.in_flight.most
            if len(grammar.forced) > most:
                work.forced = True
                offers[sequence.key] = Offer(len(sequence.tokens), grammar.forced[: most + work.max_draft])
        return offers

    def choose(self, seats: Iterable[Work]) -> list[int]:
        """Decide, for the seats of a step that is launched, which draw with masks. Returns their indices."""
        masked = []
        for index, work in enumerate(seats if self._running else ()):
            if (caution := work.sequence.caution) is not None:
                if caution.launch():
                    masked.append(index)
                else:
                    work.unmasked = True
        return masked

    def check(self, work: Work, tokens: Seq[int]) -> int:
        """Count the first of the tokens of a work, drawn without masks, that the grammar allows."""
        grammar, caution = work.sequence.sampler.grammar, work.sequence.caution
        assert grammar is not None, "a sequence without a grammar is checked"
        assert caution is not None, "a sequence with a grammar runs without caution"
        count = grammar.fitting(tokens)
        (caution.passed if count == len(tokens) else caution.cut)()
        if not count and grammar.slow:
            self._ask(work.sequence)
        return count

    def draw(self, ticket: Ticket, seats: Seq[Work]) -> list[Work]:
        """Compute the masks of a step, and have its tokens drawn. Every step before has landed. Returns the works that
        draw nothing: they have ended, or a worker must compute their masks."""
        drafts, sheet = self._rounds.drafts(ticket), self._rounds.sheet(ticket)
        drawing = []
        for index, branches in drafts.items():
            sequence = seats[index].sequence
            if sequence.in_flight.left or not self.has(sequence):
                continue
            if self._goes_on(sequence, sequence.sampler.fill(branches, sheet)):
                drawing.append(index)
        self._rounds.draw(ticket, drawing)
        if len(drawing) == len(drafts):
            return []
        missing = [seats[index] for index in drafts if index not in drawing]
        for work in missing:
            if work.sequence.caution is not None:
                work.sequence.caution.repeat()
        return missing

    def _goes_on(self, sequence: Sequence, outlook: Outlook) -> bool:
        """Return True if tokens may follow. Otherwise the sequence ends, or a worker finds out."""
        if outlook is Outlook.UNKNOWN:
            self._ask(sequence)
        elif outlook is not Outlook.TOKENS:
            sequence.finish, sequence.error = ENDS[outlook]
        return outlook is Outlook.TOKENS

    def _ask(self, sequence: Sequence) -> None:
        grammar = _grammar(sequence)
        if not grammar.looked:
            self._pending[sequence.key] = self._pool.submit(grammar.mask)


def _grammar(sequence: Sequence) -> GrammarState:
    grammar = sequence.sampler.grammar
    assert grammar is not None, "a mask without a grammar"
    return grammar
