"""Copies in the rounds of a device: who is looked for, how far, and when a network rests because texts repeat.

The governor decides how long the drafts of a portfolio's network are. Here each sequence gets a copy beside that. Where
all texts of a batch have repeated for a while, the round goes without the network. Where the network rests because
plain rounds are faster, copies go on for the sequences in which the last one was right. The others are looked at now
and then (`engine.copying`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from paceline.accept.registry import in_use
from paceline.engine.copying import FOLLOWED_TOKENS, Copying, Experience
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Landed, Rounds
from paceline.runner.rounds.traits import copies_alone, longest_copy
from paceline.types import OffKind

if TYPE_CHECKING:
    from paceline.engine.scheduler import Work

LOOK_ROUNDS = 16  # rounds of a network's rest after which all its sequences are looked at
WITHOUT_NETWORK = frozenset({OffKind.PLAIN_FASTER, OffKind.LOW_ACCEPTANCE, OffKind.WOULD_NOT_PAY})
LOOKUP = "ngram"  # by which statistics name what was copied


class Copies:
    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._everyone = Experience()
        self._resting: Counter[str] = Counter()  # drafter → rounds in a row in which its network drafted for nobody
        self._paused: Collection[str] = ()  # drafters whose rounds without the network are plain

    def plan(self, sequences: Seq[Sequence], wishes: list[int], useful: Callable[[Sequence], int]) -> list[int]:
        """Return the wishes with room for copies. `wishes`: tokens that networks may draft; `useful`: tokens of a
        sequence's draft, at most."""
        for drafter in dict.fromkeys([s.drafter for s in sequences]):
            if drafter is not None and longest_copy(self._rounds.drafters.get(drafter)):
                wishes = self._plan(drafter, sequences, wishes, useful)
        return wishes

    def pause(self, drafters: Collection[str]) -> None:
        """Let rounds in which these drafters do not draft be plain in this step: their time is to be measured."""
        self._paused = drafters

    def _plan(
        self, drafter: str, sequences: Seq[Sequence], wishes: list[int], useful: Callable[[Sequence], int]
    ) -> list[int]:
        by, mine = self._rounds.drafters[drafter], []
        for i, sequence in enumerate(sequences):
            if sequence.drafter == drafter:
                mine.append((i, sequence, wishes[i], sequence.copying or self._begin(sequence)))
        alone = copies_alone(by) and drafter not in self._paused
        drafting = [state for _, _, wish, state in mine if wish]
        followed = alone and drafting and min([state.followed for state in drafting]) >= FOLLOWED_TOKENS
        self._resting[drafter] = 0 if drafting else self._resting[drafter] + 1
        looks = self._resting[drafter] % LOOK_ROUNDS == 0
        most, lengths = min(longest_copy(by), self._rounds.max_draft), [*wishes]
        if drafting and not followed and len(sequences) > 1:
            most = max([wish for _, _, wish, _ in mine])  # all seats of a round have as many rows as the longest draft
        for i, sequence, wish, state in mine:
            state.passes, state.max_copy = 0 if followed else wish, 0
            state.sure = state.bar if state.passes else state.lone_bar
            if state.allowed and (wish or (alone and (looks or state.hopes) and _may_copy(sequence))):
                room = min(useful(sequence), most) if alone else wish
                state.max_copy = max(min(state.length, room), 0)
            lengths[i] = max(state.passes, state.max_copy)
            if lengths[i]:
                sequence.off = None
        return lengths

    def share(self, works: Seq[Work], drafter: str | None) -> None:
        """Divide the drafts of works among network and lookup, if `drafter`, which drafts in their step, has both."""
        for work in works if self.knows(drafter) else ():
            state, most = work.sequence.copying, work.max_draft
            if most and work.drafter == drafter and state is not None:
                work.by_network, work.max_copy, work.sure = (
                    min(most, state.passes),
                    min(most, state.max_copy),
                    state.sure,
                )

    def knows(self, drafter: str | None) -> bool:
        """Return whether a drafter copies beside its network."""
        return longest_copy(self._rounds.drafters.get(drafter or "")) > 0

    def learn(self, work: Work, landed: Landed) -> None:
        """Learn from the outcome of a work with a match, before its tokens are committed, and say who has drafted."""
        state, match, drafter = work.sequence.copying, landed.match, work.drafter
        if state is None or match is None or drafter is None:
            return
        state.learn(work.sequence.tokens, landed, self._everyone, network=work.by_network > 0)
        work.copied = match.copied
        if landed.drafted:
            work.member = LOOKUP if match.copied else str(getattr(self._rounds.drafters[drafter], "network", drafter))

    def shares(self, sequences: Collection[Sequence]) -> list[float]:
        """Return for each sequence in which share of rounds a copy takes the place of the network's draft."""
        return [0.0 if sequence.copying is None else sequence.copying.share for sequence in sequences]

    def _begin(self, sequence: Sequence) -> Copying:
        sequence.copying = Copying(allowed=_takes_copies(sequence))
        sequence.copying.set_bars(self._everyone)
        return sequence.copying


def _may_copy(sequence: Sequence) -> bool:
    """Return whether copies may be drafted where the network is not asked."""
    return sequence.off is not None and sequence.off.kind in WITHOUT_NETWORK


def _takes_copies(sequence: Sequence) -> bool:
    """Return whether the rule of a sequence judges copies as it judges the network's drafts: one that wants
    distributions or confidence would not."""
    rule = in_use(sequence.request.speculation.rule)
    return not (rule.wants_confidence or (rule.wants_probs and not sequence.sampler.greedy))
