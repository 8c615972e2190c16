"""How far heads on the device have read the hidden states of each sequence.

A round holds the states of the positions that it commits, and the first pass of the next draft reads them:

    committed   0 ........................ L-2  L-1 │
    read        0 ...... heard-1 │ held .. L-2      │

A sequence that decodes plainly drafts nothing, and its held states pile up. All heads catch up together, before the
oldest states would be lost, and one sequence alone if it is about to draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Chunk, Rounds
from paceline.runner.rounds.traits import added_by, head_of, held_for


class Hearing:
    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        # Drafters with a head that reads hidden states → positions of a sequence whose states are held.
        self.heads = {
            name: held_for(name, rounds.drafters, rounds.max_draft)
            for name, by in rounds.drafters.items()
            if head_of(by) is not None
        }

    def catch_up(self, seats: Seq[Work], drafter: str | None) -> list[Chunk]:
        """Make chunks with which a head reads held states of sequences that have decoded plainly."""
        if drafter is None or drafter not in self.heads:
            return []
        usual = self._usual(drafter)
        plain = [work for work in seats if not work.sequence.in_flight.drafts]  # a draft reads what is held itself
        lags = [(work, _most_unheard(work.sequence)) for work in plain if work.sequence.drafter == drafter]
        full = any(lag >= self.heads[drafter] - usual for _, lag in lags)
        late = [work.sequence for work, lag in lags if lag > usual and (full or work.by_network)]
        for sequence in late:
            self.reach(sequence, _known_end(sequence), drafter)
        return [Chunk(each.lane, _known_end(each) - 1, 1, draws=False, target=False, drafts=True) for each in late]

    def reach(self, sequence: Sequence, end: int, drafter: str) -> None:
        """Note that the head has read the states before `end`. If states were lost, pages keep a gap: the follower, who
        tells which of them other sequences can use, stays behind."""
        state = sequence.in_flight
        follower, heard = state.follower, state.heard
        if follower is not None and follower.known >= heard and end - heard <= self.heads[drafter]:
            follower.reach(end)
        if end > heard:
            state.heard = end

    def unread(self, sequence: Sequence) -> dict[str, int]:
        """Count, after a cut, the held states before the last token that the sequence's drafter has to read: at least
        one, with which a draft begins. Empty: they were lost, or held for another drafter."""
        state, drafter = sequence.in_flight, sequence.in_flight.held_for
        if drafter is None or drafter != sequence.drafter:
            return {}
        if drafter not in self.heads:
            return {drafter: 1}
        last = len(sequence.tokens) - 1
        unread, room = max(last - state.heard, 1), self.heads[drafter] - 2 * self._usual(drafter)
        if unread <= room:  # two rounds have held states behind the cut, in the place of the oldest
            return {drafter: unread}
        state.heard = last
        return {}

    def _usual(self, drafter: str) -> int:
        """Return the number of states that a round adds at most, and that a draft itself reads."""
        return added_by(self._rounds.drafters[drafter], self._rounds.max_draft)


def _most_unheard(sequence: Sequence) -> int:
    """Count the positions whose states the head has not read, if copies in flight are right."""
    state = sequence.in_flight
    return _known_end(sequence) - state.heard + state.most - state.least


def _known_end(sequence: Sequence) -> int:
    """Return the position of the last token that is committed when the next launch runs; perhaps there are more."""
    return len(sequence.tokens) + sequence.in_flight.least - 1
