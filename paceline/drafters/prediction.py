"""Drafting from a text that the client predicts, such as the file before an edit.

An answer follows its prediction until it differs. Then the last tokens of the answer are searched for in the
prediction: the longest match is best, and among equals the nearest to the point where the answer left the prediction.
Until a match is found the prediction drafts nothing, and the request's other drafter may draft.

    prediction   a b c d e f g h i
    answer       a b c X Y f g          parted at d, found again at f: h i … is the draft

The engine keeps a `Trail` for each sequence, which sees committed tokens only. The drafter proposes the tokens ahead of
the trail's place. Beside a device these tokens are an offer, and the device searches it in the same way for what the
step in flight has committed (`kernels.offer_reference`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import Recipe
from paceline.kernels.offer_reference import FAR_MATCH_TOKENS, MAX_MATCH_TOKENS
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

PREDICTION = "prediction"
# Chosen on edits of code and text: docs/experiments.md, "Predictions: where to look again after an edit".
NEAR_TOKENS = 8  # distance from where the answer left the prediction, within which a match of one token is enough
MAX_CANDIDATES = 32  # places compared on either side of where the answer left the prediction


class Prediction:
    """A predicted text with an index for searching."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = tuple(tokens)
        self.after: dict[int, list[int]] = {}  # token → the places after its occurrences, ascending
        for place, token in enumerate(self.tokens, start=1):
            self.after.setdefault(token, []).append(place)


class Trail:
    """The place of an answer in its prediction, at first the beginning."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._place: int | None = 0  # index of the predicted next token; None: the answer left the prediction
        self._matched = 0  # number of last tokens of the answer that match before that index
        self._parted = 0  # index where the answer last followed with at least two matching tokens
        self._recent: deque[int] = deque(maxlen=MAX_MATCH_TOKENS)  # tokens of the answer, the latest first

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were committed."""
        predicted = self._prediction.tokens
        for token in tokens:
            self._recent.appendleft(token)
            place = self._place
            if place is not None and place < len(predicted) and predicted[place] == token:
                self._place, self._matched = place + 1, self._matched + 1
            else:
                self._place, self._matched = self._find(token)
            if self._place is not None and self._matched > 1:
                self._parted = self._place

    def ahead(self, count: int) -> tuple[int, ...]:
        """Return up to `count` predicted next tokens; empty if the answer left the prediction or it has ended."""
        return () if self._place is None else self._prediction.tokens[self._place : self._place + count]

    def _find(self, token: int) -> tuple[int | None, int]:
        """Find the place after the best match of the last tokens, and count the tokens that match there.

        The place is None where no match is long enough."""
        after = self._prediction.after.get(token)
        if after is None:
            return None, 0
        middle = bisect_left(after, self._parted)
        places = after[max(middle - MAX_CANDIDATES, 0) : middle + MAX_CANDIDATES]
        matched, distance, place = max([(self._match(place), -abs(place - self._parted), place) for place in places])
        return (None, 0) if -distance > NEAR_TOKENS and matched < FAR_MATCH_TOKENS else (place, matched)

    def _match(self, place: int) -> int:
        """Count the last tokens of the answer that are found right before this place."""
        predicted, count = self._prediction.tokens, 0
        for token in self._recent:
            if count == place or predicted[place - 1 - count] != token:
                break
            count += 1
        return count


class PredictionDrafter(Drafter):
    """Proposes the continuation that comes with each ask."""

    name = PREDICTION
    max_draft = 64
    needs_prediction = True

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tokens=ask.predicted[: ask.max_draft]) for ask in asks]


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    parse_options(PREDICTION, options, {})
    return Recipe(
        name=PREDICTION, build=lambda context: PredictionDrafter(), how="follows the text that a request predicts"
    )
