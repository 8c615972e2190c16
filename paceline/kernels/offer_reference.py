"""Align offers with committed tokens, in plain torch: the definition of kernels/cuda/offer.py, also run on CPUs.

The host offers continuations of sequences whose last step may still be in flight, so an offer begins where the host's
knowledge ends. The part of it that lies before the true end must be what was committed; the rest is then the draft.

    committed   … a b │ c d                the host knows the tokens up to b
    offered           │ c d e f g          c d are equal: e f g is the draft
    offered           │ c x e f g          x is not d: no draft
    offered           │ c x d f g          with `near` tokens to look for d: f g is the draft

An offer from a known text goes on behind an edit. So if it differs from what was committed, the last committed tokens
are looked for in it: the longest match is best, and among equals the nearest to where the offer was expected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.lookup_reference import FAR_MATCH_TOKENS, MAX_MATCH_TOKENS
from paceline.kernels.tree_reference import TreeLanes

HEADER = 4  # columns of a row before its tokens: most drafted tokens, first position, number of tokens, `near`


def offer(state: TreeLanes, *, seats: Tensor, offers: Tensor, counts: Tensor, pdl: bool = False) -> None:
    """Write the drafts that the host offers behind the committed tokens of `seats` (lanes, int32 [seats]).

    `offers` int32 [seats, HEADER + width] has a row for each seat; if its number of tokens is 0 there is no offer, and
    nothing changes. For a seat with an offer, `counts` int32 [seats] becomes 1 + the number of its drafted tokens:
    its rows in the verification, a chain. An offer that does not agree with the committed tokens gives no draft, unless
    it has a `near` above 0, and the last of them are found in it."""
    lane, width = seats.long()[:, None], state.tokens.shape[1]
    most, start, offered, near = offers[:, :HEADER].long().T[:, :, None]  # [seats, 1] each
    tokens = offers[:, HEADER:]
    length = state.lengths[lane].long()
    known = length - start  # offered tokens that lie before the end
    index = torch.arange(tokens.shape[1], device=offers.device)
    at = (start + index).clamp(min=0, max=width - 1)  # [seats, tokens]
    equal = ((tokens == state.tokens[lane, at]) | (index >= known)).all(1, keepdim=True)
    fits = equal & (known >= 0) & (known <= offered) & (offered > 0)
    again = _found_again(state.tokens[lane[:, 0]], length, tokens, known, offered, near)
    first = torch.where(fits, known, again)  # offered token that is drafted first
    fits |= again > 0
    count = torch.where(fits, torch.minimum(torch.minimum(most, offered - first), width - length).clamp(min=0), 0)
    # Tokens beyond the draft are written, too: a row that could only draw a sure token looks there for it.
    at = length + index - first
    drafted = fits & (index >= first) & (index < offered) & (at < width) & (lane != state.dummy)
    state.tokens[lane.expand_as(at)[drafted], at[drafted]] = tokens[drafted]
    counts.copy_(torch.where(offered > 0, 1 + count, counts[:, None].long())[:, 0])
    chain = torch.arange(-1, state.parents.shape[1] - 1, dtype=torch.int32, device=offers.device)
    state.parents[lane[:, 0]] = torch.where(offered > 0, chain, state.parents[lane[:, 0]])


def _found_again(text: Tensor, length: Tensor, tokens: Tensor, known: Tensor, offered: Tensor, near: Tensor) -> Tensor:
    """Find the place in each offer behind the best match of the last committed tokens of `text` [seats, width].

    Returns int64 [seats, 1]; 0: none is long enough, or `near` is 0."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[None, :]  # [1, tokens] places behind tokens
    matched, run = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    for back in range(MAX_MATCH_TOKENS):
        last = text.gather(1, (length - 1 - back).clamp(min=0))
        before = tokens.gather(1, (place - 1 - back).clamp(min=0).expand_as(tokens))
        run = run & (before == last) & (place > back) & (length > back)
        matched = matched + run
    distance = (place - known).abs()
    enough = (matched > 0) & ((distance <= near) | (matched >= FAR_MATCH_TOKENS)) & (place <= offered)
    enough &= (near > 0) & (known >= 0)
    value = torch.where(enough, (matched.long() * 4096 - distance) * 2 + (place > known), -1)
    best, at = value.max(1, keepdim=True)
    return torch.where(best >= 0, at + 1, 0)
