"""Drafting from a text that the client predicts, such as the file before an edit.

The last tokens of the answer are looked for in the prediction: the longest match is best, and among equals the nearest
to where the answer would be, had it gone on in step with the prediction. Near that place one token is enough.

    prediction   a b c d e f g h i
    answer       a b c X Y f g          parted at d, found again at f: h i … is the draft

The engine keeps a `Trail` for each sequence, which sees committed tokens only. The drafter proposes the tokens ahead of
the trail's place. Where a request has another drafter, that one drafts while the answer is off the trail. Where it has
none, the last tokens are looked for in prompt and output, too, and the longer match drafts (`NgramDrafter`). On a GPU
the device looks in the prediction itself (`kernels.lookup_reference`). Beside a drafter of the device, the tokens ahead
are an offer (`kernels.offer_reference`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.ngram import LookupOnDevice, NgramDrafter
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import Recipe
from paceline.kernels.lookup_reference import FAR_MATCH_TOKENS, MAX_MATCH_TOKENS, NEAR_TOKENS, SURE_TOKENS
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

PREDICTION = "prediction"
MAX_CANDIDATES = 16  # far places compared on either side of the expected one


class Prediction:
    """A predicted text with an index for searching."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = tuple(tokens)

    @cached_property
    def after(self) -> dict[tuple[int, ...], list[int]]:
        """Places after the occurrences of each `FAR_MATCH_TOKENS` tokens, the latest first; none after the last token.

        Places are ascending."""
        places: dict[tuple[int, ...], list[int]] = {}
        backwards, end = self.tokens[::-1], len(self.tokens)
        for place in range(FAR_MATCH_TOKENS, end):
            places.setdefault(backwards[end - place : end - place + FAR_MATCH_TOKENS], []).append(place)
        return places


class Trail:
    """The place of an answer in its prediction, at first the beginning."""

    def __init__(self, prediction: Prediction, prompt: Sequence[int] = ()) -> None:
        self.matched = 0  # number of last tokens that match before the place
        self._prediction = prediction
        self._place: int | None = 0  # index of the predicted next token; None: the answer left the prediction
        self._expected = 0  # place, had the answer gone on in step since the last match of `SURE_TOKENS`
        self._recent = tuple(prompt[: -MAX_MATCH_TOKENS - 1 : -1])  # tokens of prompt and answer, the latest first

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were committed."""
        predicted = self._prediction.tokens
        for token in tokens:
            self._recent = (token, *self._recent[: MAX_MATCH_TOKENS - 1])
            self._expected += 1
            place = self._place
            # No other match can be better than one of all tokens that count, at the expected place.
            if place is not None and self.matched >= MAX_MATCH_TOKENS and predicted[place] == token:
                place, self.matched = place + 1, self.matched + 1
            if place is None or place == self._place or place == len(predicted):
                place, self.matched = self._find(token)
            self._place = place
            if place is not None and self.matched >= SURE_TOKENS:
                self._expected = place

    def ahead(self, count: int) -> tuple[int, ...]:
        """Return up to `count` predicted next tokens; empty if the answer left the prediction or it has ended."""
        return () if self._place is None else self._prediction.tokens[self._place : self._place + count]

    def leads(self, tokens: Sequence[int]) -> bool:
        """Return whether these are the predicted next tokens."""
        return len(tokens) > 0 and self.ahead(len(tokens)) == tuple(tokens)

    def _find(self, token: int) -> tuple[int | None, int]:
        """Find the place after the best match of the last tokens, and count the tokens that match there.

        The place is None where no match is long enough."""
        predicted, expected, places = self._prediction.tokens, self._expected, self._far()
        first = expected - NEAR_TOKENS if expected > NEAR_TOKENS else 1
        window = predicted[first - 1 : expected + NEAR_TOKENS]
        if token in window:
            near = [place for place, other in enumerate(window, first) if other == token and place < len(predicted)]
            places = places + near
        if not places:
            return None, 0
        matched, _, place = max([(self._match(place), -abs(place - expected), place) for place in places])
        return place, matched

    def _far(self) -> list[int]:
        """Return the places after a match of `FAR_MATCH_TOKENS`, the nearest to the expected one on either side."""
        after = self._prediction.after.get(self._recent[:FAR_MATCH_TOKENS])
        if after is None:
            return []
        middle = bisect_left(after, self._expected)
        return after[max(middle - MAX_CANDIDATES, 0) : middle + MAX_CANDIDATES]

    def _match(self, place: int) -> int:
        """Count the last tokens of the answer that are found right before this place."""
        predicted, count = self._prediction.tokens, 0
        for token in self._recent:
            if count == place or predicted[place - 1 - count] != token:
                break
            count += 1
        return count


class PredictionDrafter(NgramDrafter):
    """Proposes the continuation that comes with each ask; alone, one from prompt and output after a longer match."""

    name = PREDICTION
    max_draft = 64
    needs_prediction = True

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._own(ask) or Draft(tokens=ask.predicted[: ask.max_draft]) for ask in asks]

    def _own(self, ask: Ask) -> Draft | None:
        """Draft from prompt and output, if more of the last tokens are found there than in the prediction.

        Beside another drafter nothing is indexed: a long prompt would take longer than a step of a GPU."""
        if not ask.alone or ask.matched >= MAX_MATCH_TOKENS:
            return None
        return self.continuation(ask.key, ask.tokens, ask.max_draft, longer_than=ask.matched) or None


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    parse_options(PREDICTION, options, {})
    return Recipe(
        name=PREDICTION,
        build=lambda context: PredictionDrafter(),
        how="follows the text that a request predicts",
        on_device=lambda built, to: LookupOnDevice(reads_prediction=True),
    )
