"""One tile in attention of prompts: its scores, its weights, and its values added to a partial, by turns.

A group of four warps holds 64 rows. Keys and values are rings of tiles in shared memory: (memory, barriers that say
which stages are ready). A stage of both is `free` once its values are summed. Tiles are counted over all blocks of a
program, by `done`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _higher_half(x):
    """Compare both halves of each row, number by number, and take the higher ones."""
    first, second = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.maximum(first, second)


@gluon.jit
def _highest(raw):
    """Find the highest score of each row, by halves: in a chain, each comparison would wait for the one before."""
    few = _higher_half(_higher_half(_higher_half(raw)))
    return gl.convert_layout(gl.max(few, 1), gl.SliceLayout(1, raw.type.layout))


@gluon.jit
def _weigh(raw, peak, total, scale):
    """Turn scores into weights: `added` of attend.py up to its product."""
    higher = gl.maximum(peak, _highest(raw) * scale)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    old = gl.exp2(peak - safe)
    weights = gl.exp2(gl.fma(raw, scale, gl.expand_dims(-safe, 1)))
    steps = gl.sum((weights + 2.0).to(gl.int32, bitcast=True), 1)
    total = gl.fma(total, old, steps.to(gl.float32) * (1.0 / 4194304))
    return weights, old, higher, total


@gluon.jit
def merge(peak, total, acc, peak_, total_, acc_, OUT: gl.constexpr):
    """Merge two partials, as `merged` of attend.py does."""
    higher = gl.maximum(peak, peak_)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    old, new = gl.exp2(peak - safe), gl.exp2(peak_ - safe)
    total = gl.fma(total, old, total_ * new)
    old, new = gl.convert_layout(old, OUT), gl.convert_layout(new, OUT)
    return higher, total, gl.fma(acc, gl.expand_dims(old, 1), acc_ * gl.expand_dims(new, 1))


@gluon.jit
def _seen(raw, block, tile, window, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Mask scores that a row does not see. Tiles that all rows of the block see, from `low` on, need no mask."""
    place, low, rows = block
    edge = tile * TILE + TILE > low + 1
    if WINDOW:
        edge = edge | (tile * TILE + window < low + rows)
    if edge:
        n = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, raw.type.layout))
        seen = gl.expand_dims(place, 1) >= gl.expand_dims(n, 0)
        if WINDOW:
            seen = seen & (gl.expand_dims(place - window, 1) < gl.expand_dims(n, 0))
        raw = gl.where(seen, raw, float("-inf"))
    return raw


@gluon.jit
def score(q_mem, keys, done, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Start to multiply queries by the keys of a tile, the one after `done` others. They must be there."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    nothing = gl.full([64, TILE], 0.0, gl.float32, SCORES)
    tile = keys[0].index(done % STAGES).permute((1, 0))
    return warpgroup_mma(q_mem, tile, nothing, use_acc=False, is_async=True)


@gluon.jit
def scored(raw):
    """Await the scores of a tile."""
    return warpgroup_mma_wait(0, deps=[raw])


@gluon.jit
def await_tile(memory, done, STAGES: gl.constexpr):
    """Await a tile of keys or values, the one after `done` others."""
    mbarrier.wait(memory[1].index(done % STAGES), (done // STAGES) & 1)


@gluon.jit
def add(
    which: gl.constexpr, MORE: gl.constexpr, raw, peak, total, acc, done, tile, block,
    q_mem, keys, values, free, turns, scale, window,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Add a tile to a partial; if there are MORE tiles, start to score the next one. What a partial without a peak has
    summed counts for nothing: its weight is 0.

    Both products are one turn at the tensor cores. It ends with the first, so that they never wait for the other half.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    raw = _seen(raw, block, tile, window, TILE, WINDOW)
    weights, old, peak, total = _weigh(raw, peak, total, scale)
    acc = acc * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, SUMS)), 1)
    weights = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
    await_tile(values, done, STAGES)
    if MORE:
        await_tile(keys, done + 1, STAGES)
    mbarrier.wait(turns.index(which), (done & 1) ^ (1 - which))
    acc = warpgroup_mma(weights, values[0].index(done % STAGES), acc, is_async=True)
    if MORE:
        raw = score(q_mem, keys, done + 1, TILE, STAGES)
        acc = warpgroup_mma_wait(1, deps=[acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(done % STAGES), count=1)
    mbarrier.arrive(turns.index(1 - which), count=1)
    return raw, peak, total, acc
