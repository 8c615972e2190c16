"""A drafter that copies: if the last tokens occurred before, their continuation is the draft; else an inner drafter
computes one.

Texts repeat long passages: quotations, edited code, lists. There a copy is longer than any computed draft, and costs
nothing. The length of a copy depends on the acceptance of the sequence's last copy. After a copy of which less than
half was accepted, the next drafts are not copied: 1 draft, then 3, 7, … if it happens several times in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, FeatureDrafter, Seen
from paceline.drafters.ngram import NgramDrafter
from paceline.types import Off

COPY_AFTER = 5  # tokens: length of the match whose continuation is copied
MAX_COPY = 16  # tokens of the longest copy
FIRST_COPY_TOKENS = 8  # length of a sequence's first copy
MAX_STRIKES = 6  # mostly wrong copies in a row that are counted; after 6 of them, 63 drafts are not copied


@dataclass(slots=True)
class _Copies:
    """The copies of one sequence."""

    length: int = FIRST_COPY_TOKENS  # tokens of the next copy
    last: int = 0  # tokens of the latest copy; 0: the latest draft is no copy
    rest: int = 0  # drafts until the next one that may be a copy
    strikes: int = 0  # copies in a row of which less than half was accepted

    def learn(self, accepted: int, *, longest: int) -> None:
        self.length = min(2 * self.length, longest) if accepted == self.last else accepted + 2
        self.strikes = 0 if 2 * accepted >= self.last else min(self.strikes + 1, MAX_STRIKES)
        self.rest = 2**self.strikes


class CopyDrafter(FeatureDrafter):
    """Copies if the last `after` tokens occurred together before, and else asks `inner`.

    Name, taps and hidden states are those of `inner`."""

    ends_drafts = True

    def __init__(self, inner: Drafter, *, after: int, longest: int = MAX_COPY) -> None:
        self.name = inner.name
        self.taps = inner.taps
        self.max_draft = max(inner.max_draft, longest)
        self._inner = inner
        self._memory = NgramDrafter(min_ngram=after, max_ngram=after)
        self._longest = longest
        self._copies: dict[int, _Copies] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._inner.start(key, lane, tokens)
        self._memory.start(key, lane, tokens)
        self._copies[key] = _Copies()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [self._copy(ask) for ask in asks]
        most = self._inner.max_draft
        others = [ask.within(most) for ask, draft in zip(asks, drafts, strict=True) if not draft.tokens]
        computed = iter(self._inner.propose(others) if others else ())
        return [draft if draft.tokens else next(computed) for draft in drafts]

    def _copy(self, ask: Ask) -> Draft:
        """Draft a copy; empty if copies are suspended, or if there is nothing to copy."""
        copies = self._copies[ask.key]
        copies.rest -= copies.rest > 0
        draft = EMPTY
        if not copies.rest:
            found = self._memory.continuation(ask.key, ask.tokens, min(ask.max_draft, copies.length))
            draft = Draft(found.tokens, passes=0) if found.tokens else EMPTY
        copies.last = len(draft.tokens)
        return draft

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        copies = self._copies[key]
        if copies.last:
            copies.learn(accepted, longest=self._longest)
        else:
            self._inner.observe(key, tokens, accepted)

    def stop(self, key: int) -> None:
        self._inner.stop(key)
        self._memory.stop(key)
        del self._copies[key]

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        assert isinstance(self._inner, FeatureDrafter), f"{self.name} reads no hidden states"
        return self._inner.feed(features, seen, crowded=crowded)

    def knows(self, page: int) -> bool:
        return not isinstance(self._inner, FeatureDrafter) or self._inner.knows(page)
