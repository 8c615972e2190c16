"""Drafting with an EAGLE-3 head, from the rows that it has yet to read: trees in one call, or chains token by token.

    the head    ...... known-1 │ held ... L-2 │       first pass: the held rows; the last gives token L
    draft                             │ L-1  L …      further passes, on the head's own output: one level of a tree
                                                      each, or one token of a chain

A `TreeHead` drafts a whole tree without the host. A draft is a chain for other heads, and if the host must act between
two tokens (penalties, rules that need distributions).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.draft_in_progress import DraftInProgress, head_confidence, probability_of
from paceline.drafters.tree_drafting import Thresholds
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.protocol import HeadForward
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Pick

# Estimated probability that the next token of a chain is right, given that the draft so far is in doubt. Not measured
# separately; trees have another estimate, for the best of several tokens (`runner.heads.trees`).
DOUBTFUL_CONFIDENCE = 0.5


class ChainDrafting:
    """Drafts chains, one pass a token, with the host in between."""

    def __init__(self, head: HeadForward, *, lanes: Lanes, thresholds: Thresholds, vocab_size: int, pick: Pick) -> None:
        """`vocab_size` and `pick` are the target's."""
        self._head = head
        self._ids = head.ids.tolist()
        self._lanes = lanes
        self._thresholds = thresholds
        self._vocab_size = vocab_size
        self._pick = pick

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        """Draft after the held rows `shares`, one of each ask, with their hidden states."""
        drafts = [DraftInProgress(ask, min_confidence=self._thresholds.of_chain(ask)) for ask in asks]
        ends = np.cumsum([share.rows for share in shares]).tolist()
        # Unfinished drafts, each with its row of the pass.
        going = [(draft, end - 1) for draft, end in zip(drafts, ends, strict=True)]
        output = self._head(build_batch(self._lanes, shares, ahead=1), features=features)
        while True:
            for i, (draft, _) in enumerate(going):
                self._draw(draft, output.logits[i : i + 1], int(output.argmax[i]))
            going = [(draft, row) for draft, row in going if not draft.over]
            if not going:
                return [draft.finished() for draft in drafts]
            batch = build_batch(self._lanes, [_next_row(draft) for draft, _ in going], ahead=1)
            output = self._head(batch, carry=[row for _, row in going])
            going = [(draft, row) for row, (draft, _) in enumerate(going)]

    def _draw(self, draft: DraftInProgress, logits: Tensor, best: int) -> None:
        """Draw one more token from logits [1, draft vocabulary], and put it behind the committed tokens of its lane."""
        sampler, position = draft.ask.sampler, np.array([draft.position])
        if draft.free:
            logits = self._spread(logits)
            token = place = draft.draw_freely(logits, self._pick)
        elif sampler.params.edits_logits:
            logits = sampler.edit(self._spread(logits), [draft.tokens])
            token = place = int(sampler.draw(logits, position, self._pick)[0])
        else:
            place = best if sampler.greedy else int(sampler.draw(logits, position, self._head.pick)[0])
            token = self._ids[place]
        self._lanes.tokens_np[draft.ask.lane, draft.position] = token
        if draft.ask.rule.wants_confidence:
            draft.tell(place, logits)
        draft.tokens.append(token)
        if draft.min_confidence and not draft.complete:
            draft.confidence *= head_confidence(probability_of(place, logits[0]), drawn=not sampler.greedy)

    def _spread(self, logits: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary; tokens outside of the draft vocabulary get -inf."""
        whole = torch.full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._head.ids.long()] = logits
        return whole


def _next_row(draft: DraftInProgress) -> Share:
    """Return the row that follows the last one: of the position before the token drawn last."""
    return Share(lane=draft.ask.lane, start=draft.position - 2, count=1)
