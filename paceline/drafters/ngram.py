"""Lookup drafting: copy the tokens that followed an earlier occurrence of the last tokens, in prompt or output.

For each length n from `max_ngram` down to `min_ngram`, the last n tokens are looked up among all earlier n-grams of
the sequence. The most recent occurrence is used, and the tokens after it are the draft. A copy that reaches the end of
the sequence continues with its own first tokens, so that a repeating text is drafted as repeating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import Recipe
from paceline.errors import InvalidRequest
from paceline.kernels.lookup_reference import MAX_MATCH_TOKENS
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DraftingRound


@dataclass(slots=True)
class _History:
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram → index after its latest occurrence
    indexed: int = 0  # n-grams that end before this index are in `ends`


class NgramDrafter(Drafter):
    name = "ngram"
    max_draft = 16
    copies = True

    def __init__(self, *, min_ngram: int = 1, max_ngram: int = MAX_MATCH_TOKENS) -> None:
        if not 1 <= min_ngram <= max_ngram <= 64:
            raise InvalidRequest(f"1 <= min_ngram <= max_ngram <= 64 is needed, not {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[int, _History] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._histories[key] = _History(tokens=tokens.tolist())

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self.continuation(ask.key, ask.tokens, ask.max_draft) for ask in asks]

    def stop(self, key: int) -> None:
        del self._histories[key]

    def continuation(self, key: int, committed: np.ndarray, count: int, *, longer_than: int = 0) -> Draft:
        """Draft `count` tokens after the committed ones, or none. New committed tokens are indexed first.

        `longer_than`: matches of so many tokens and fewer do not count."""
        history = self._histories[key]
        tokens = history.tokens
        tokens += committed[len(tokens) :].tolist()
        self._index(history)
        for size in self._sizes:
            end = history.ends.get(tuple(tokens[-size:])) if size > longer_than else None
            if end is not None:
                return Draft(tokens=tuple(_copy(tokens, end, count)))
        return EMPTY

    def _index(self, history: _History) -> None:
        """Index all n-grams but those that end with the last token: nothing follows them yet."""
        tokens, ends = history.tokens, history.ends
        for end in range(history.indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        history.indexed = max(len(tokens) - 1, 0)


@dataclass(frozen=True, slots=True)
class LookupOnDevice:
    """Implements DeviceDrafter: finds the drafts of NgramDrafter inside rounds, by a search of the whole history.

    With `reads_prediction` it finds those of PredictionDrafter."""

    min_ngram: int = 1
    max_ngram: int = MAX_MATCH_TOKENS
    reads_prediction: bool = False
    reader: None = None
    finds_fewer: bool = True

    def draft(self, round: DraftingRound) -> None:
        round.look_up(min_ngram=self.min_ngram, max_ngram=self.max_ngram, predicted=self.reads_prediction)


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    given = parse_options(NgramDrafter.name, options, {"min_ngram": int, "max_ngram": int})
    drafter = NgramDrafter(**given)
    return Recipe(
        name=NgramDrafter.name,
        build=lambda context: drafter,
        how="looks up tokens, computes nothing",
        on_device=lambda built, to: LookupOnDevice(**given),
    )


def _copy(tokens: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; at the end of the text the copy continues with its own first tokens."""
    copied = tokens[start : start + count]
    period = len(tokens) - start
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied
