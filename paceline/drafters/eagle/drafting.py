"""Drafting with an EAGLE head, from the rows that it has yet to read: trees in one call, or chains.

    the head    ...... known-1 │ held ... L-2 │       first pass: the held rows; the last gives token L
    draft                             │ L-1  L …      further passes, on the head's own output: one level of a tree
                                                      each, or one token of a chain

A `TreeHead` drafts a whole tree without the host. A draft is a chain for other heads, and if the host must act between
two tokens (penalties, rules that need distributions). P-EAGLE drafts a chain in its first pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.draft_in_progress import DraftInProgress, head_confidence, probability_of
from paceline.drafters.masked_drafting import masked
from paceline.drafters.tree_drafting import Thresholds
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.mask_row import MaskRow
from paceline.runner.heads.protocol import HeadForward, Outputs
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Pick

# Estimated probability that the next token of a chain is right, given that the draft so far is in doubt. Not measured
# separately; trees have another estimate, for the best of several tokens (`runner.heads.trees`).
DOUBTFUL_CONFIDENCE = 0.5


class Draws:
    """Draws drafted tokens from a head's logits, and puts them behind the committed tokens of their lanes."""

    def __init__(self, head: Outputs, *, lanes: Lanes, vocab_size: int, pick: Pick) -> None:
        """`vocab_size` and `pick` are the target's."""
        self._head = head
        self._ids = head.ids.tolist()
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._pick = pick

    def draw(self, draft: DraftInProgress, logits: Tensor, best: int) -> None:
        """Draw one more token from logits [1, draft vocabulary], whose best output is `best`, and estimate from them
        how sure the draft still is."""
        place, logits = self.draw_token(draft, logits, best)
        if draft.min_confidence and not draft.complete:
            probability = probability_of(place, logits[0])
            draft.confidence *= head_confidence(probability, drawn=not draft.ask.sampler.greedy)

    def draw_token(self, draft: DraftInProgress, logits: Tensor, best: int) -> tuple[int, Tensor]:
        """Draw one more token from logits [1, draft vocabulary], whose best output is `best`; return its place in the
        logits that it was drawn from, and these."""
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
        return place, logits

    def _spread(self, logits: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary; tokens outside of the draft vocabulary get -inf."""
        whole = torch.full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._head.ids.long()] = logits
        return whole


class ChainDrafting:
    """Drafts chains, one pass a token, with the host in between."""

    def __init__(self, head: HeadForward, *, lanes: Lanes, thresholds: Thresholds, draws: Draws) -> None:
        self._head = head
        self._lanes = lanes
        self._thresholds = thresholds
        self._draws = draws

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        """Draft after the held rows `shares`, one of each ask, with their hidden states."""
        drafts = [DraftInProgress(ask, min_confidence=self._thresholds.of_chain(ask)) for ask in asks]
        ends = np.cumsum([share.rows for share in shares]).tolist()
        # Unfinished drafts, each with its row of the pass.
        going = [(draft, end - 1) for draft, end in zip(drafts, ends, strict=True)]
        output = self._head(build_batch(self._lanes, shares, ahead=1), features=features)
        while True:
            for i, (draft, _) in enumerate(going):
                self._draws.draw(draft, output.logits[i : i + 1], int(output.argmax[i]))
            going = [(draft, row) for draft, row in going if not draft.over]
            if not going:
                return [draft.finished() for draft in drafts]
            batch = build_batch(self._lanes, [_next_row(draft) for draft, _ in going], ahead=1)
            output = self._head(batch, carry=[row for _, row in going])
            going = [(draft, row) for row, (draft, _) in enumerate(going)]


class ParallelDrafting:
    """Drafts chains with a P-EAGLE head: all tokens of all drafts come from one pass.

        the head    ...... known-1 │ held ... L-2 │ L-1 … L+k-3        positions of the rows
        tokens                     │      ... L-1 │ mask … mask        k - 1 rows of the mask
        guesses                              L      L+1 … L+k-1

    Keys and values of the mask's rows are overwritten when the head reads these positions."""

    def __init__(self, head: HeadForward, mask: MaskRow, *, lanes: Lanes, thresholds: Thresholds, draws: Draws) -> None:
        self._head = head
        self._mask = mask
        self._lanes = lanes
        self._thresholds = thresholds
        self._draws = draws

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        """Draft after the held rows `shares`, one of each ask, with their hidden states."""
        wider = [masked(ask, share, self._mask.token, self._lanes) for ask, share in zip(asks, shares, strict=True)]
        held = torch.split(features, [share.rows for share in shares])
        masks = [self._mask.features.to(features.device).expand(ask.max_draft - 1, -1) for ask in asks]
        rows = torch.cat([part for pair in zip(held, masks, strict=True) for part in pair])
        output = self._head(build_batch(self._lanes, wider, ahead=1), features=rows)
        drafts = [DraftInProgress(ask, min_confidence=self._thresholds.of_chain(ask)) for ask in asks]
        row = 0
        for draft in drafts:
            for at in range(row, row + draft.ask.max_draft):
                if not draft.over:
                    self._draws.draw(draft, output.logits[at : at + 1], int(output.argmax[at]))
            row += draft.ask.max_draft
        return [draft.finished() for draft in drafts]


def _next_row(draft: DraftInProgress) -> Share:
    """Return the row that follows the last one: of the position before the token drawn last."""
    return Share(lane=draft.ask.lane, start=draft.position - 2, count=1)
