"""Drafts of a head or a model that computes trees without the host: what is asked of it, by prices and filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.kernels.base import Batch
from paceline.runner.batch import Share
from paceline.runner.heads.protocol import TreeDrafter, TreeRequest

MakeBatch = Callable[[Sequence[Share], int], Batch]
"""(shares of a first pass, positions past its last row that page tables reach) → its batch."""
NO_TOP_K = 1 << 30  # larger than any vocabulary
NO_FILTERS = 0.0, 1.0, 0  # min_p, top_p and top_k that keep all tokens


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Confidence below which tokens are not worth drafting.

    A request's `p_min` decides, else the drafter's `min_confidence`, else the price of one more token."""

    min_confidence: float | None
    next_acceptance: float  # estimated probability that the next token of a chain is right, if all before it are

    def of_chain(self, ask: Ask) -> float:
        """Return the confidence in a whole chain below which it ends."""
        own = self._given(ask)
        return ask.price / self.next_acceptance if own is None else own

    def of_tree(self, ask: Ask) -> tuple[float, float]:
        """Return the minimum confidence of a node, and the price of a level."""
        own = self._given(ask)
        if own is not None:
            return own, own
        least = min(ask.row_prices) if ask.row_prices else ask.row_price
        return least, ask.price - ask.row_price

    def of_row(self, ask: Ask, row: int) -> float:
        """Return the confidence below which the token of a row is not drafted, if one pass computes all of them and
        only its verification costs time."""
        own = self._given(ask)
        if own is not None:
            return own
        return ask.row_prices[row] if row < len(ask.row_prices) else ask.row_price

    def row_prices(self, ask: Ask) -> tuple[float, ...]:
        """Return the confidence at which the first, second … node of a tree pays for its row; (): `of_tree` decides."""
        return ask.row_prices if self._given(ask) is None else ()

    def _given(self, ask: Ask) -> float | None:
        return self.min_confidence if ask.p_min is None else ask.p_min


class TreeDrafting:
    """Drafts trees in one call."""

    def __init__(self, by: TreeDrafter, make_batch: MakeBatch, *, thresholds: Thresholds, branches: int) -> None:
        self._by = by
        self._make_batch = make_batch
        self._thresholds = thresholds
        self._branches = branches

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor | None = None) -> list[Draft]:
        """Draft after the rows `shares`, one of each ask; a head reads their hidden states."""
        for share, ask in zip(shares, asks, strict=True):
            share.seed, share.inverse_temperature = ask.sampler.seed, ask.sampler.inverse_temperature
        wanted = [_wanted(ask, *self._thresholds.of_tree(ask), self._thresholds.row_prices(ask)) for ask in asks]
        batch = self._make_batch(shares, max(each.limit for each in wanted))
        trees = self._by.draft(batch, features, wanted, width=self._branches)
        return [
            Draft(tuple(tokens), _branching(parents), passes=passes, confidence=tuple(confidence))
            for tokens, parents, passes, confidence in trees
        ]


def is_simple(ask: Ask) -> bool:
    """Tell whether a draft needs no host between its tokens: greedy or with temperature and filters, and without
    `probs`. Tokens that a grammar forbids are cut from the draft."""
    return ask.sampler.is_simple and (ask.sampler.greedy or not ask.rule.wants_probs)


def _wanted(ask: Ask, worth: float, least: float, row_prices: tuple[float, ...]) -> TreeRequest:
    params, filters = ask.sampler.params, NO_FILTERS
    if params.filters and not ask.sampler.greedy:
        filters = params.min_p, params.top_p, min(params.top_k, NO_TOP_K)
    return TreeRequest(ask.max_draft, worth, least, *filters, row_prices)


def _branching(parents: list[int]) -> tuple[int, ...]:
    """Return the parents of a tree, or nothing where it is a chain."""
    return () if parents == [*range(-1, len(parents) - 1)] else tuple(parents)
