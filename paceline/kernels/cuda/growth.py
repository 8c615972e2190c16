"""`grow` and `prune` of trees on a CUDA device; `growth_reference` defines them.

Each is one launch, with a program for each seat. `grow` merges what `branch` has found in chunks of the vocabulary,
adds the nodes and lays out the next pass.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.branch import CHUNK, scratch_of
from paceline.kernels.growth_reference import AHEAD_MAX, FIRST_BEST, FIRST_DRAWN, OTHER_DRAWN, Growth
from paceline.kernels.tree_reference import TreeLanes

_PAGE_SIZE = tl.constexpr(PAGE_SIZE)
_LOWEST = tl.constexpr(float("-inf"))
_F0, _F1, _F3 = (tl.constexpr(FIRST_DRAWN[i]) for i in (0, 1, 3))
_O0, _O1, _O2, _O3 = (tl.constexpr(value) for value in OTHER_DRAWN)
_B0, _B1, _AHEAD = (tl.constexpr(value) for value in (*FIRST_BEST, AHEAD_MAX))


def grow(
    state: TreeLanes,
    growth: Growth,
    *,
    seats: Tensor,
    level: int,
    roots: Tensor,
    ends: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    vocab: int,
    fitted: bool = True,
    shared: bool = False,
    pdl: bool = False,
) -> None:
    """Add the candidates of `branch` over `vocab` columns as nodes, and lay out the next pass; see `growth_reference`.

    `fitted` must be that of `branch`."""
    width, chunks = growth.width, triton.cdiv(vocab, CHUNK)
    tops, rows = max(2, width), 1 if level == 0 else width
    scratch = scratch_of(growth.tokens.device, len(growth.row_tokens), chunks, tops)
    _grow[(len(seats),)](
        *scratch,
        state.lengths,
        state.inverse_temperature,
        state.pages,
        state.pages.stride(0),
        state.tokens.shape[1],
        state.dummy,
        seats,
        roots,
        ends,
        thresholds,
        limits,
        growth.confidence,
        growth.tokens,
        growth.parents,
        growth.chosen,
        growth.row_tokens,
        growth.positions,
        growth.slots,
        growth.ends,
        growth.bases,
        growth.tails[level % 2],
        growth.tails[(level + 1) % 2],
        growth.confidence.shape[1],
        growth.first(level),
        level,
        chunks,
        WIDTH=width,
        ROWS=rows,
        LEVELS=growth.levels,
        TOPS=tops,
        CANDIDATES=triton.next_power_of_2(chunks * tops),
        CHUNKS=triton.next_power_of_2(chunks),
        NODES=triton.next_power_of_2(rows * width),
        DEPTH=triton.next_power_of_2(growth.levels),
        FIRST=level == 0,
        LAST=level + 1 == growth.levels,
        FITTED=fitted,
        SHARED=shared,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


def prune(state: TreeLanes, growth: Growth, *, seats: Tensor, limits: Tensor, found: Tensor, pdl: bool = False) -> None:
    """Write the best nodes of each tree as its draft; see `growth_reference`."""
    nodes = growth.confidence.shape[1]
    _prune[(len(seats),)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.parents,
        state.parents.stride(0),
        state.parents.shape[1],
        state.lengths,
        state.dummy,
        seats,
        limits,
        growth.confidence,
        growth.tokens,
        growth.parents,
        found,
        nodes,
        NODES=triton.next_power_of_2(nodes),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(
    do_not_specialize=["dummy", "nodes", "first", "level", "chunks"],
    do_not_specialize_on_alignment=["old_tails", "new_tails"],
)
def _grow(
    scores,
    raws,
    tops,
    peaks,
    totals,
    lengths,
    inverse_temperature,
    pages,
    pages_stride,
    width,
    dummy,
    seats,
    roots,
    ends,
    thresholds,
    limits,
    confidence,
    tokens,
    parents,
    chosen,
    row_tokens,
    positions,
    slots,
    carry,
    bases,
    old_tails,
    new_tails,
    nodes,
    first,
    level,
    chunks,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    TOPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNKS: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FITTED: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    lane = tl.load(seats + b)
    length = tl.load(lengths + lane)
    scale = tl.load(inverse_temperature + lane)
    unit = tl.maximum(scale, 1.0)
    least = tl.load(thresholds + b)
    limit = tl.load(limits + b)
    confidence += b.to(tl.int64) * nodes
    node = tl.arange(0, NODES)
    own = tl.full([NODES], -1.0, tl.float32)
    token = node * 0
    parent = node * 0 - 1
    each = tl.arange(0, CANDIDATES)
    part = tl.arange(0, CHUNKS)
    for row in tl.static_range(ROWS):
        above, leads = tl.load(roots + b), length * 0 - 1
        if not FIRST:
            leads = tl.load(chosen + b * WIDTH + row)
            above = tl.where(leads >= 0, tl.load(confidence + tl.maximum(leads, 0)), -1.0)
        source = (b if SHARED else b * ROWS + row).to(tl.int64) * chunks
        score = tl.load(scores + source * TOPS + each, mask=each < chunks * TOPS, other=_LOWEST)
        raw = tl.load(raws + source * TOPS + each, mask=each < chunks * TOPS, other=0.0)
        name = tl.load(tops + source * TOPS + each, mask=each < chunks * TOPS, other=0)
        peak = tl.load(peaks + source + part, mask=part < chunks, other=_LOWEST)
        highest = tl.max(peak, axis=0)
        total = tl.load(totals + source + part, mask=part < chunks, other=0.0)
        total = tl.sum(total * tl.exp(peak - highest), axis=0)
        best = tl.max(score, axis=0)
        ahead = best * 0.0
        for rank in tl.static_range(WIDTH):
            value = tl.max(score, axis=0)
            at = tl.min(tl.where(score == value, each, CANDIDATES), axis=0)
            score = tl.where(each == at, _LOWEST, score)
            if rank == 0:
                ahead = tl.minimum((best - tl.max(score, axis=0)) / unit, _AHEAD)
            chance = tl.exp(tl.sum(tl.where(each == at, raw, 0.0), axis=0) - highest) / total
            if FITTED:
                root = tl.sqrt(chance)
                if rank == 0:
                    noisy = _logistic(_F0 * root + _F1 * ahead + _F3)
                    chance = _logistic(_B0 * tl.log(chance / (1.0 - chance)) + _B1)
                else:
                    noisy = _logistic(_O0 * root + _O1 * (best - value) / unit + _O2 * rank + _O3)
                chance = tl.where(scale > 0, noisy, chance)
            chance = tl.where(chance == chance, chance, 0.0)
            sure = above * chance
            kept = sure >= least
            if rank == 0:
                kept = kept | (level == 0)
            kept = kept & (above >= 0) & (limit > 0)
            here = node == row * WIDTH + rank
            own = tl.where(here, tl.where(kept, sure, -1.0), own)
            token = tl.where(here, tl.sum(tl.where(each == at, name, 0), axis=0), token)
            parent = tl.where(here, leads, parent)
    there = node < ROWS * WIDTH
    tl.store(confidence + first + node, own, mask=there)
    tl.store(tokens + b.to(tl.int64) * nodes + first + node, token, mask=there)
    tl.store(parents + b.to(tl.int64) * nodes + first + node, parent, mask=there)
    if not LAST:
        tl.debug_barrier()  # `chosen` has been read
        left = tl.where(there, own, -2.0)
        step = tl.arange(0, DEPTH)
        tl.store(bases + b, length - 1)
        for i in tl.static_range(WIDTH):
            most = tl.max(left, axis=0)
            at = tl.min(tl.where(left == most, node, NODES), axis=0)
            left = tl.where(node == at, -2.0, left)
            place = level * WIDTH + i
            read = most >= 0
            if not SHARED:
                read = read & (place <= limit)
            column = tl.minimum(length - 1 + place, width - 1)
            column = tl.where(read, column, 0)
            page = tl.where(read, lane, dummy).to(tl.int64) * pages_stride + column // _PAGE_SIZE
            slot = tl.load(pages + page) * _PAGE_SIZE + column % _PAGE_SIZE
            origin = at // WIDTH
            out = b * WIDTH + i
            tl.store(chosen + out, tl.where(read, first + at, -1))
            tl.store(row_tokens + out, tl.where(read, tl.sum(tl.where(node == at, token, 0), axis=0), 0))
            tl.store(positions + out, length - 1 + level)
            tl.store(slots + out, slot)
            if FIRST:
                tl.store(carry + out + 1, tl.maximum(tl.load(ends + b + 1), 1))
            else:
                tl.store(carry + out + 1, b * WIDTH + origin + 1)
            tail = tl.load(old_tails + (b * WIDTH + origin) * LEVELS + step, mask=step < level, other=0)
            tl.store(new_tails + out * LEVELS + step, tl.where(step == level, slot, tail), mask=step <= level)


@triton.jit(do_not_specialize=["dummy", "nodes", "most"])
def _prune(
    lane_tokens,
    stride,
    width,
    lane_parents,
    parents_stride,
    most,
    lengths,
    dummy,
    seats,
    limits,
    confidence,
    tokens,
    parents,
    found,
    nodes,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    lane = tl.load(seats + b)
    length = tl.load(lengths + lane)
    node = tl.arange(0, NODES)
    start = b.to(tl.int64) * nodes
    own = tl.load(confidence + start + node, mask=node < nodes, other=-2.0)
    parent = tl.load(parents + start + node, mask=node < nodes, other=-1)
    token = tl.load(tokens + start + node, mask=node < nodes, other=0)
    same, earlier = own[None, :] == own[:, None], node[None, :] < node[:, None]
    better = (own[None, :] > own[:, None]) | (same & earlier)  # [node, other]: the other comes before it
    rank = tl.sum(better.to(tl.int32), axis=1)
    kept = (own >= 0) & (rank < tl.minimum(tl.load(limits + b), most)) & (lane != dummy)
    above = tl.sum(tl.where(parent[:, None] == node[None, :], rank[None, :], 0), axis=1)
    above = tl.where(parent >= 0, above, -1)
    wide = lane.to(tl.int64)
    tl.store(lane_tokens + wide * stride + length + rank, token, mask=kept & (length + rank < width))
    tl.store(lane_parents + wide * parents_stride + rank, above, mask=kept)
    tl.store(found + b, tl.sum(kept.to(tl.int32), axis=0))
