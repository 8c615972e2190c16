"""Offers of the host on a CUDA device, aligned with committed tokens; `offer_reference` defines the operation.

One program for each seat. A token of an offer belongs to one position of the lane: it is compared there if the position
is committed, and else written there. If a committed one differs, the last committed tokens are looked for in the offer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.lookup_reference import FAR_MATCH_TOKENS, MAX_MATCH_TOKENS
from paceline.kernels.offer_reference import HEADER
from paceline.kernels.tree_reference import TreeLanes

_HEADER = tl.constexpr(HEADER)
_MAX_MATCH, _FAR_MATCH = tl.constexpr(MAX_MATCH_TOKENS), tl.constexpr(FAR_MATCH_TOKENS)


def offer(state: TreeLanes, *, seats: Tensor, offers: Tensor, counts: Tensor, pdl: bool = False) -> None:
    """Write the drafts that the host offers behind the committed tokens; see `offer_reference`."""
    assert offers.stride(1) == 1, "the columns of `offers` must be adjacent"
    _offer[(len(seats),)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.lengths,
        state.dummy,
        seats,
        offers,
        offers.stride(0),
        offers.shape[1] - HEADER,
        counts,
        state.parents,
        state.parents.stride(0),
        state.parents.shape[1],
        TOKENS=triton.next_power_of_2(offers.shape[1] - HEADER),
        NODES=triton.next_power_of_2(max(1, state.parents.shape[1])),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


@triton.jit
def _offer(
    tokens,
    stride,
    width,
    lengths,
    dummy,
    seats,
    offers,
    offer_stride,
    columns,
    counts,
    parents,
    parents_stride,
    nodes,
    TOKENS: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    mine = offers + seat * offer_stride
    offered = tl.load(mine + 2)
    if offered > 0:
        most, start, near = tl.load(mine), tl.load(mine + 1), tl.load(mine + 3)
        lane = tl.load(seats + seat)
        length = tl.load(lengths + lane)
        known = length - start  # offered tokens that lie before the end
        index = tl.arange(0, TOKENS)
        token = tl.load(mine + _HEADER + index, mask=index < columns, other=0)
        text = tokens + lane.to(tl.int64) * stride
        before = (index < known) & (index < columns)
        different = before & (tl.load(text + start + index, mask=before, other=0) != token)
        fits = (tl.sum(different.to(tl.int32), axis=0) == 0) & (known >= 0) & (known <= offered)
        first = known  # offered token that is drafted first
        if (not fits) & (near > 0) & (known >= 0):
            first = _found_again(text, length, mine + _HEADER, known, offered, near, TOKENS)
            fits = first > 0
        count = tl.maximum(tl.minimum(tl.minimum(most, offered - first), width - length), 0)
        count = tl.where(fits, count, 0)
        # Beyond the draft, too: a row that can only draw a sure token looks there for it.
        inside = (index >= first) & (index < offered) & (length + index - first < width)
        tl.store(text + length + index - first, token, mask=fits & inside & (lane != dummy))
        tl.store(counts + seat, 1 + count)
        node = tl.arange(0, NODES)
        tl.store(parents + lane.to(tl.int64) * parents_stride + node, node - 1, mask=node < nodes)


@triton.jit
def _found_again(text, length, offered_tokens, known, offered, near, TOKENS: tl.constexpr):
    """Find the place in an offer behind the best match of the last committed tokens; 0: none is long enough."""
    place = 1 + tl.arange(0, TOKENS)  # behind an offered token
    matched = tl.zeros([TOKENS], tl.int32)
    run = place <= offered
    for back in tl.static_range(_MAX_MATCH):
        run = run & (place > back) & (length > back)
        last = tl.load(text + length - 1 - back, mask=length > back, other=0)
        run = run & (tl.load(offered_tokens + place - 1 - back, mask=run, other=0) == last)
        matched += run.to(tl.int32)
    distance = tl.abs(place - known)
    enough = (matched > 0) & ((distance <= near) | (matched >= _FAR_MATCH))
    value = tl.where(enough, (matched * 4096 - distance) * 2 + (place > known).to(tl.int32), -1)
    best = tl.max(value, axis=0)
    return tl.where(best >= 0, tl.min(tl.where(value == best, place, TOKENS + 1), axis=0), 0)
