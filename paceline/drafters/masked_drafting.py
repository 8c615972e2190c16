"""Drafts of a model that was trained to draft in one pass (PARD): all tokens of all drafts come from it.

    read       0 ...... known-1 │ known ... L-1 │ L ........ L+k-2      positions
    tokens                      │   committed   │ mask …… mask          k - 1 rows of the mask
    guesses                     │            L  │ L+1 ... L+k-1         the last committed row gives the first

Keys and values of the mask's rows are no text's: they are written over when the model reads these positions. A further
token costs its row of the verification alone, so a draft ends where the confidence in it does not pay for that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.chain_drafting import ChainDrafting
from paceline.drafters.draft_in_progress import DraftInProgress
from paceline.runner.batch import Share
from paceline.runner.lanes import Lanes


class MaskedDrafting:
    def __init__(self, chains: ChainDrafting, *, lanes: Lanes, mask: int) -> None:
        """`mask`: the token of drafted positions. `chains` draws tokens, and has the thresholds."""
        self._chains = chains
        self._lanes = lanes
        self._mask = mask

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share]) -> list[Draft]:
        """Draft after the rows `shares`, one of each ask."""
        wider = [masked(ask, share, self._mask, self._lanes) for ask, share in zip(asks, shares, strict=True)]
        output = self._chains.text.compute(wider)
        drafts = [DraftInProgress(ask, min_confidence=0.0) for ask in asks]
        firsts = accumulate([ask.max_draft for ask in asks], initial=0)  # row of the logits of each first token
        going = list(zip(drafts, firsts))  # noqa: B905 - the last sum is that of all
        while going:
            rows = [first + len(draft.tokens) for draft, first in going]
            for draft, _ in going:
                draft.min_confidence = self._chains.thresholds.of_row(draft.ask, len(draft.tokens))
            picked = replace(output, logits=output.logits[rows], argmax=output.argmax[rows])
            self._chains.draw([draft for draft, _ in going], picked)
            going = [(draft, first) for draft, first in going if not draft.over]
        return [replace(draft.finished(), passes=1) for draft in drafts]


def masked(ask: Ask, share: Share, mask: int, lanes: Lanes) -> Share:
    """Put the mask behind the committed tokens of an ask, and return its share with these rows and their logits."""
    end, more = len(ask.tokens), ask.max_draft - 1
    lanes.tokens_np[ask.lane, end : end + more] = mask
    return replace(share, count=share.count + more, outs=1 + more)
