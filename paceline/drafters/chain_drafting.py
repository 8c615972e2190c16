"""Drafts of a model that are chains: one pass for each token, with the host between two of them.

The host draws every token with the request's own sampler, in the target's vocabulary. So penalties, grammars and rules
that want distributions work as they do for the target. A `ModelText` says how the model's own tokens and logits relate
to the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.draft_in_progress import DraftInProgress, probability_of
from paceline.drafters.tree_drafting import Thresholds
from paceline.kernels.base import Output
from paceline.runner.batch import Share
from paceline.sampling.sampler import Pick, RowGroup, sample


class ModelText(Protocol):
    """The text that a draft model reads, while it drafts."""

    def compute(self, shares: Sequence[Share]) -> Output:
        """Run the model over shares of its text."""

    def in_target_vocabulary(self, output: Output) -> tuple[Tensor, Tensor]:
        """Return logits [outs, target's vocabulary] and their argmax."""

    def append(self, draft: DraftInProgress, token: int, logits: Tensor) -> None:
        """Add a token of the target to a draft, and to the model's text; `logits` [model's vocabulary] gave it."""

    def last_row(self, draft: DraftInProgress) -> Share:
        """Return the row of the token that was added last."""


@dataclass(frozen=True, slots=True)
class ChainDrafting:
    text: ModelText
    pick: Pick
    thresholds: Thresholds

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share]) -> list[Draft]:
        """Draft after the rows `shares`, one of each ask."""
        return [one.finished() for one in self.begin(asks, shares)]

    def begin(self, asks: Sequence[Ask], shares: Sequence[Share]) -> list[DraftInProgress]:
        """Draft, and return the drafts before they are finished."""
        going = started = [DraftInProgress(ask, min_confidence=self.thresholds.of_chain(ask)) for ask in asks]
        output = self.text.compute(shares)
        while True:
            self.draw(going, output)
            going = [one for one in going if not one.over]
            if not going:
                return started
            output = self.text.compute([self.text.last_row(one) for one in going])

    def draw(self, drafts: Sequence[DraftInProgress], output: Output) -> None:
        """Draw one more token for each draft, from an output with one row of logits for each."""
        logits, argmax = self.text.in_target_vocabulary(output)
        groups = [
            RowGroup(one.ask.sampler, slice(i, i + 1), np.array([one.position]), [one.tokens])
            for i, one in enumerate(drafts)
            if not one.free
        ]
        tokens = sample(logits, argmax, groups, self.pick).tolist()
        for i, one in enumerate(drafts):
            token = one.draw_freely(logits[i : i + 1], self.pick) if one.free else tokens[i]
            if one.ask.rule.wants_confidence:
                one.tell(token, one.ask.sampler.edit(logits[i : i + 1], [one.tokens]))
            if one.min_confidence:
                one.confidence *= self._confidence(one, logits[i], token)
            self.text.append(one, token, output.logits[i])

    def _confidence(self, draft: DraftInProgress, logits: Tensor, token: int) -> float:
        """Return the probability of `token`; with a grammar, among the tokens that it and other edits allow."""
        if draft.ask.sampler.grammar is not None:
            [logits] = draft.ask.sampler.edit(logits[None], [draft.tokens])
        return probability_of(token, logits)


def divide_rows(
    asks: Sequence[Ask], missing: Sequence[range], *, room: int
) -> tuple[list[tuple[Ask, Share]], list[tuple[Ask, Share]]]:
    """Divide `room` rows of a pass among sequences that miss tokens, the first ones first.

    Returns those that can draft after their rows, then those that get only a part of theirs."""
    ready, behind = [], []
    for ask, places in zip(asks, missing, strict=True):
        count = min(len(places), room)
        if count and count == len(places):
            ready.append((ask, Share(lane=ask.lane, start=places.start, count=count)))
        elif count:
            behind.append((ask, Share(lane=ask.lane, start=places.start, count=count, outs=0)))
        room -= count
    return ready, behind
