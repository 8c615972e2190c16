"""Drafting with an EAGLE-3 head, from the rows that it has yet to read: trees in one call, or chains token by token.

    the head    ...... known-1 │ held ... L-2 │       first pass: the held rows; the last gives token L
    draft                             │ L-1  L …      further passes, on the head's own output: one level of a tree
                                                      each, or one token of a chain

A `TreeHead` drafts a whole tree without the host. A draft is a chain for other heads, and if the host must act between
two tokens (penalties, rules that need distributions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.draft_in_progress import DraftInProgress, head_confidence, probability_of
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.protocol import HeadForward, TreeHead, TreeRequest
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Pick

# Estimated probability that the next token of a chain is right, given that the draft so far is in doubt. Not measured
# separately; tree.c has another estimate, for the best of several tokens.
DOUBTFUL_CONFIDENCE = 0.5
NO_TOP_K = 1 << 30  # larger than any vocabulary
NO_FILTERS = 0.0, 1.0, 0  # min_p, top_p and top_k that keep all tokens


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Confidence below which tokens are not worth drafting.

    A request's `p_min` decides, else the drafter's `min_confidence`, else the price of one more token."""

    min_confidence: float | None

    def of_chain(self, ask: Ask) -> float:
        """Return the confidence in a whole chain below which it ends."""
        own = self._given(ask)
        return ask.price / DOUBTFUL_CONFIDENCE if own is None else own

    def of_tree(self, ask: Ask) -> tuple[float, float]:
        """Return the minimum confidence of a node, and the price of a level."""
        own = self._given(ask)
        if own is not None:
            return own, own
        least = min(ask.row_prices) if ask.row_prices else ask.row_price
        return least, ask.price - ask.row_price

    def row_prices(self, ask: Ask) -> tuple[float, ...]:
        """Return the confidence at which the first, second … node of a tree pays for its row; (): `of_tree` decides."""
        return ask.row_prices if self._given(ask) is None else ()

    def _given(self, ask: Ask) -> float | None:
        return self.min_confidence if ask.p_min is None else ask.p_min


class TreeDrafting:
    """Drafts trees in one call of the head."""

    def __init__(self, head: TreeHead, *, lanes: Lanes, thresholds: Thresholds, branches: int) -> None:
        self._head = head
        self._lanes = lanes
        self._thresholds = thresholds
        self._branches = branches

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        """Draft after the held rows `shares`, one of each ask, with their hidden states."""
        for share, ask in zip(shares, asks, strict=True):
            share.seed, share.inverse_temperature = ask.sampler.seed, ask.sampler.inverse_temperature
        wanted = [_wanted(ask, *self._thresholds.of_tree(ask), self._thresholds.row_prices(ask)) for ask in asks]
        batch = build_batch(self._lanes, shares, ahead=1, beyond=max(each.limit for each in wanted))
        trees = self._head.draft(batch, features, wanted, width=self._branches)
        return [Draft(tuple(tokens), _branching(parents), passes=passes) for tokens, parents, passes in trees]


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
        draft.tokens.append(token)
        if draft.min_confidence and not draft.complete:
            draft.confidence *= head_confidence(probability_of(place, logits[0]), drawn=not sampler.greedy)

    def _spread(self, logits: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary; tokens outside of the draft vocabulary get -inf."""
        whole = torch.full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._head.ids.long()] = logits
        return whole


def is_simple(ask: Ask) -> bool:
    """Tell whether a head can draft without the host: greedy or with temperature and filters, and without `probs`.
    Tokens that a grammar forbids are cut from the draft."""
    return ask.sampler.is_simple and (ask.sampler.greedy or not ask.rule.wants_probs)


def _wanted(ask: Ask, worth: float, least: float, row_prices: tuple[float, ...]) -> TreeRequest:
    params, filters = ask.sampler.params, NO_FILTERS
    if params.filters and not ask.sampler.greedy:
        filters = params.min_p, params.top_p, min(params.top_k, NO_TOP_K)
    return TreeRequest(ask.max_draft, worth, least, *filters, row_prices)


def _branching(parents: list[int]) -> tuple[int, ...]:
    """Return the parents of a tree, or nothing where it is a chain."""
    return () if parents == [*range(-1, len(parents) - 1)] else tuple(parents)


def _next_row(draft: DraftInProgress) -> Share:
    """Return the row that follows the last one: of the position before the token drawn last."""
    return Share(lane=draft.ask.lane, start=draft.position - 2, count=1)
