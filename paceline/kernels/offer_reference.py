"""Align offers with committed tokens, in plain torch: the definition of kernels/cuda/offer.py, also run on CPUs.

The host offers continuations of sequences whose last step may still be in flight, so an offer begins where the host's
knowledge ends. The part of it that lies before the true end must be what was committed; the rest is then the draft.

    committed   … a b │ c d                the host knows the tokens up to b
    offered           │ c d e f g          c d are equal: e f g is the draft
    offered           │ c x e f g          x is not d: no draft
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.tree_reference import TreeLanes

HEADER = 3  # columns of a row of offers before its tokens: most drafted tokens, first position, number of tokens


def offer(state: TreeLanes, *, seats: Tensor, offers: Tensor, counts: Tensor, pdl: bool = False) -> None:
    """Write the drafts that the host offers behind the committed tokens of `seats` (lanes, int32 [seats]).

    `offers` int32 [seats, HEADER + width] has a row for each seat; if its number of tokens is 0 there is no offer, and
    nothing changes. For a seat with an offer, `counts` int32 [seats] becomes 1 + the number of its drafted tokens:
    its rows in the verification, a chain. An offer that does not agree with the committed tokens gives no draft."""
    lane, width = seats.long()[:, None], state.tokens.shape[1]
    most, start, offered = offers[:, :HEADER].long().T[:, :, None]  # [seats, 1] each
    tokens = offers[:, HEADER:]
    length = state.lengths[lane].long()
    known = length - start  # offered tokens that lie before the end
    index = torch.arange(tokens.shape[1], device=offers.device)
    at = (start + index).clamp(min=0, max=width - 1)  # [seats, tokens]
    equal = ((tokens == state.tokens[lane, at]) | (index >= known)).all(1, keepdim=True)
    fits = equal & (known >= 0) & (known <= offered) & (offered > 0)
    count = torch.where(fits, torch.minimum(torch.minimum(most, offered - known), width - length).clamp(min=0), 0)
    # Tokens beyond the draft are written, too: a row that could only draw a sure token looks there for it.
    drafted = fits & (index >= known) & (index < offered) & (start + index < width) & (lane != state.dummy)
    state.tokens[lane.expand_as(at)[drafted], at[drafted]] = tokens[drafted]
    counts.copy_(torch.where(offered > 0, 1 + count, counts[:, None].long())[:, 0])
    chain = torch.arange(-1, state.parents.shape[1] - 1, dtype=torch.int32, device=offers.device)
    state.parents[lane[:, 0]] = torch.where(offered > 0, chain, state.parents[lane[:, 0]])
