"""Drafting from a text that the client predicts, such as the file before an edit.

An answer follows its prediction until it says something else. Then the place is looked for again, by the last tokens of
the answer: where they stand in the prediction, the longer the match and the nearer to where the two parted the better.
Until it is found the prediction has nothing to say, and somebody else may draft.

    prediction   a b c d e f g h i
    answer       a b c X Y f g          parted at d, found again at f: h i … is the draft

Following is the engine's matter (a `Trail` belongs to a sequence, and sees committed tokens only); the drafter proposes
what lies ahead of the place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from paceline.draft import Draft
from paceline.drafters.base import Ask

PREDICTION = "prediction"
LONGEST = 8  # tokens of a match that are counted
NEAR = 8  # tokens from where the two parted; further away a match needs FAR_MATCH tokens
FAR_MATCH = 3
CANDIDATES = 32  # places on either side that are looked at


class Prediction:
    """A predicted text, ready to be searched."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = tuple(tokens)
        self.after: dict[int, list[int]] = {}  # token → the places after its occurrences, ascending
        for place, token in enumerate(self.tokens, start=1):
            self.after.setdefault(token, []).append(place)


class Trail:
    """Where an answer stands in its prediction. It begins at the beginning."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._place: int | None = 0  # of the token that should come next; None: lost
        self._matched = 0  # tokens of the answer that stand before it
        self._parted = 0  # where the answer last followed for sure
        self._recent: deque[int] = deque(maxlen=LONGEST)  # tokens of the answer, the latest first

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        for token in tokens:
            self._recent.appendleft(token)
            if self._place is not None and self.ahead(1) == (token,):
                self._place, self._matched = self._place + 1, self._matched + 1
            else:
                self._place, self._matched = self._find(token)
            if self._place is not None and self._matched > 1:
                self._parted = self._place

    def ahead(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that should come next; none where the answer is lost, or the prediction at its end."""
        return () if self._place is None else self._prediction.tokens[self._place : self._place + count]

    def _find(self, token: int) -> tuple[int | None, int]:
        """The place after the best match of the last tokens, and how many match; None: none of them says enough."""
        after = self._prediction.after.get(token, [])
        middle = bisect_left(after, self._parted)
        places = after[max(middle - CANDIDATES, 0) : middle + CANDIDATES]
        found = [(self._match(place), -abs(place - self._parted), place) for place in places]
        matched, distance, place = max(found, default=(0, 0, 0))
        if not matched or (-distance > NEAR and matched < FAR_MATCH):
            return None, 0
        return place, matched

    def _match(self, place: int) -> int:
        """How many of the last tokens stand before this place."""
        before = reversed(self._prediction.tokens[max(place - LONGEST, 0) : place])
        pairs = zip(before, self._recent, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class PredictionDrafter:
    name = PREDICTION
    max_draft = 64
    inline = True

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        pass  # all it knows comes with an ask

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tokens=ask.predicted[: ask.max_draft]) for ask in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        pass

    def stop(self, key: int) -> None:
        pass
