"""Tiles and partials of attention: add a tile of positions to a partial softmax, keep partials, and merge them.

`attend` gives the order. A partial is the largest score of each row, the sum of its weights, and the weighted sum of
values.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(2.0**-22)  # of whole numbers that sum up weights
NOBODY: tl.constexpr = tl.constexpr(1 << 30)  # a row past all rows
DEEP: tl.constexpr = tl.constexpr(16)  # positions that a tensor core adds at a time


@triton.jit
def add_tile(
    tile, slot, q, keys, values, place, scale, window, end, peak, total, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Add one tile to a partial. `place` [BLOCK_M]: positions of rows."""
    position = tile * TILE + tl.arange(0, TILE)
    k, v = _fetch(keys, values, slot, position < end, q.dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)
    scores = tl.where(_seen(place, position, window, WINDOW), tl.dot(q, k, input_precision="ieee"), float("-inf"))
    return added(scores, v, scale, peak, total, acc)


@triton.jit
def _seen(place, position, window, WINDOW: tl.constexpr):
    """Return which positions [n] the rows at `place` [BLOCK_M] see."""
    distance = place[:, None] - position[None, :]
    seen = distance >= 0
    if WINDOW:
        seen = seen & (distance < window)
    return seen


@triton.jit
def add_tail(
    tile, slot, table, pages, q, keys, values, place, lead, tails, scale, window, depth, end, base, main, paths,
    peak, total, acc, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    TAIL: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Add a tile in which rows of a tree see slots of their own paths. `lead` [BLOCK_M]: rows of `tails` they read.

    A product adds DEEP positions at a time. So only the TAIL positions from the multiple of DEEP below the base on are
    read once for each path; those before them are read once for all rows, to the same bits, with the first path.
    """
    cut = tl.maximum(base // DEEP * DEEP, tile * TILE)
    past = tl.max(tl.where(lead < NOBODY, lead, main), 0) + 1
    position = tile * TILE + tl.arange(0, TILE)
    inside = position < end
    k, v = _fetch(keys, values, slot, inside, q.dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)
    seen = _seen(place, position, window, WINDOW) & ((position < cut)[None, :] | (lead == main)[:, None])
    scores = tl.where(seen, tl.dot(q, k, input_precision="ieee"), float("-inf"))

    position = cut + tl.arange(0, TAIL)
    inside = position < tl.minimum(end, (tile + 1) * TILE)
    seen = _seen(place, position, window, WINDOW) & inside[None, :]
    tail_scores = tl.full([q.shape[0], TAIL], float("-inf"), tl.float32)
    for path in range(main + paths, past, paths):
        own_slot = slots_of(table, position, pages, PAGE, False)
        own_slot = on_path(own_slot, position, tails, path, end, base, depth)
        own_k = _keys(keys, own_slot, inside, q.dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)
        mine = seen & (lead == path)[:, None]
        tail_scores = tl.where(mine, tl.dot(q, own_k, input_precision="ieee"), tail_scores)

    higher = tl.maximum(peak, tl.maximum(tl.max(scores, 1), tl.max(tail_scores, 1)) * scale)
    old = tl.exp2(peak - tl.where(higher == float("-inf"), 0.0, higher))
    weights, tail_weights = weights_of(scores, higher, scale), weights_of(tail_scores, higher, scale)
    steps = steps_of(weights) + steps_of(tail_weights)
    total = tl.fma(total, old, steps.to(tl.float32) * STEP)
    acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    for path in range(main + paths, past, paths):
        own_slot = slots_of(table, position, pages, PAGE, False)
        own_slot = on_path(own_slot, position, tails, path, end, base, depth)
        own_v = _values(values, own_slot, inside, q.dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)
        more = tl.dot(tail_weights.to(v.dtype), own_v, acc, input_precision="ieee")
        acc = tl.where((lead == path)[:, None], more, acc)  # slots of one path change nothing for rows on others
    return higher, total, acc


@triton.jit
def on_path(slot, position, tails, path, end, base, depth):
    """Replace the slots of positions from `base` on by those of a path's tail."""
    tails += (path + tl.zeros([], tl.int64)) * depth
    ahead = (position < end) & (position >= base) & (position - base < depth)
    return tl.where(position < base, slot, settled(tails + (position - base), ahead, 0))


@triton.jit
def slots_of(table, position, pages, PAGE: tl.constexpr, EARLY: tl.constexpr):
    """Load the KV slots of positions, perhaps EARLY, before the wait; those past the end of the sequence are
    arbitrary."""
    if EARLY:
        page = settled(table + position // PAGE, position // PAGE < pages, 0)
    else:
        page = tl.load(table + position // PAGE, mask=position // PAGE < pages, other=0)
    return page * PAGE + position % PAGE


@triton.jit
def settled(pointer, mask=None, other=None):
    """Load what is complete but may have changed since this program's caches were filled: past them."""
    return tl.load(pointer, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def _fetch(
    keys, values, slot, inside, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    k = _keys(keys, slot, inside, dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)
    return k, _values(values, slot, inside, dtype, KV_HEADS, HEAD_DIM, PADDED, PAGE)


@triton.jit
def _keys(
    keys, slot, inside, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Load keys [PADDED, TILE] of the slots; 0 for slots that are not `inside`."""
    d = tl.arange(0, PADDED)
    cell = _cells(slot, KV_HEADS, HEAD_DIM, PAGE)
    mask = inside[None, :] & (d < HEAD_DIM)[:, None]
    return tl.load(keys + cell[None, :] + d[:, None], mask=mask, other=0.0).to(dtype)


@triton.jit
def _values(
    values, slot, inside, dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Load values [TILE, PADDED] of the slots; 0 for slots that are not `inside`."""
    d = tl.arange(0, PADDED)
    cell = _cells(slot, KV_HEADS, HEAD_DIM, PAGE)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(values + cell[:, None] + d[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _cells(slot, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr):
    """Compute where the key or value of each slot begins."""
    return ((slot // PAGE).to(tl.int64) * (KV_HEADS * PAGE) + slot % PAGE) * HEAD_DIM


@triton.jit
def added(scores, v, scale, peak, total, acc):
    """Add a tile of `scores` [BLOCK_M, TILE], -inf where a row does not see, to a partial over the tiles before it.

    Weights are relative to the highest score so far, in units of log2. Their sum is one of whole numbers, which is
    exact in any order: between 2 and 4 the bits of a float32 count steps of 2^-22, and TILE twos vanish modulo 2^32.
    `fma` fixes which product is fused; the compiler does not choose.
    """
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    old = tl.exp2(peak - tl.where(higher == float("-inf"), 0.0, higher))
    weights = weights_of(scores, higher, scale)
    total = tl.fma(total, old, steps_of(weights).to(tl.float32) * STEP)
    acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def weights_of(scores, higher, scale):
    """Compute weights relative to the highest score."""
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(tl.fma(scores, scale, -safe[:, None]))


@triton.jit
def steps_of(weights):
    """Sum weights as whole numbers."""
    return tl.sum((weights + 2.0).to(tl.int32, bitcast=True), 1)


@triton.jit
def merged(peak, total, acc, peak_, total_, acc_):
    """Merge two partials, exactly if one is empty."""
    higher = tl.maximum(peak, peak_)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(peak - safe), tl.exp2(peak_ - safe)
    total = tl.fma(total, old, total_ * new)
    acc = tl.fma(acc, old[:, None], acc_ * new[:, None])
    return higher, total, acc


@triton.jit
def nothing(BLOCK_M: tl.constexpr, PADDED: tl.constexpr):
    """Return the partial over no positions."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, PADDED], tl.float32)


@triton.jit
def keep(partials, index, valid, peak, total, acc, BLOCK_M: tl.constexpr, PADDED: tl.constexpr):
    """Store partial `index` of the block: [BLOCK_M] peaks, [BLOCK_M] totals, [BLOCK_M, PADDED] sums."""
    m = tl.arange(0, BLOCK_M)
    cell = m[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    partials += index * (BLOCK_M * (PADDED + 2))
    tl.store(partials + m, peak, mask=valid)
    tl.store(partials + BLOCK_M + m, total, mask=valid)
    tl.store(partials + 2 * BLOCK_M + cell, acc, mask=valid[:, None])


@triton.jit
def _kept(partials, index, there, BLOCK_M: tl.constexpr, PADDED: tl.constexpr):
    """Load a partial that `keep` stored, past caches that programs do not share; empty for rows not `there`."""
    m = tl.arange(0, BLOCK_M)
    cell = m[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    partials += index * (BLOCK_M * (PADDED + 2))
    peak = tl.load(partials + m, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(partials + BLOCK_M + m, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(partials + 2 * BLOCK_M + cell, mask=there[:, None], other=0.0, cache_modifier=".cg")
    return peak, total, acc


@triton.jit
def merge_splits(partials, count, valid, BLOCK_M: tl.constexpr, PADDED: tl.constexpr):
    peak, total, acc = nothing(BLOCK_M, PADDED)
    for index in range(0, count, 4):  # the loads of four overlap
        for next_ in tl.static_range(4):
            kept = _kept(partials, index + next_, valid & (index + next_ < count), BLOCK_M, PADDED)
            peak, total, acc = merged(peak, total, acc, kept[0], kept[1], kept[2])
    return total, acc


@triton.jit
def write(cells, mask, total, acc):
    """Store the weighted mean of values; zeros for rows that saw no position."""
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(cells, (acc / safe[:, None]).to(cells.dtype.element_ty), mask=mask)
