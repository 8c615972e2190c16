"""Attention of prompts on Hopper, to the bits of `attend`: the same tiles, splits and sums, arranged for many rows.

One program runs on each multiprocessor. It takes blocks of rows of one sequence, with the query heads that share a KV
head, in turns. Its warps have four parts:

    2 x load    copies tiles of keys, or of values, from pages to shared memory, ahead of their use (TMA)
    2 x math    each computes 64 rows; while one weighs scores, the other has the tensor cores

The kernel is written in Gluon, which Triton's interpreter cannot run. `attend` is its twin: tests on a GPU compare
both bit by bit.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.prefill_plan import LISTED, block_of, list_blocks, rounds_of

SHARED = 226 * 1024  # bytes of shared memory for queries, keys and values
MANY_ROWS = 64  # of a sequence: fewer leave most of a block empty
WIDTH = 64  # columns of a copied box: 128 bytes, the widest swizzle of shared memory
BOX = gl.NVMMASharedLayout(128, 16, 2)  # the layout of a box: swizzled by 128 bytes, elements of 16 bits


def fits(queries: Tensor, kv: CudaKV, *, group: int, tile: int, max_rows: int) -> bool:
    """Return whether the kernel can compute this: bf16 on Hopper, heads of 64 or 128, up to 64 of them on a KV head,
    tiles of eight pages."""
    on_hopper = queries.is_cuda and torch.cuda.get_device_capability(queries.device) == (9, 0)
    plain = queries.dtype == kv.keys.dtype == torch.bfloat16
    shaped = queries.shape[-1] in (64, 128) and tile == 8 * PAGE_SIZE and group <= 64
    return on_hopper and plain and shaped and max_rows > MANY_ROWS


def prefill(
    queries: Tensor,
    kv: CudaKV,
    layer: int,
    *,
    row_starts: Tensor,
    positions: Tensor,
    page_table: Tensor,
    out: Tensor,
    seats: int,
    scale: float,
    window: int,
    lanes: Tensor | None,
    tile: int,
    tiles: int,
    stages: int = 0,
) -> None:
    """Compute `out` [rows, heads, head_dim]; the rows of a seat have ascending positions. `scale` is in units of log2,
    `tile` in positions, `tiles` those of a split, `stages` tiles of shared memory (0: as many as there is room for)."""
    rows, heads, head_dim = queries.shape
    keys, values = kv.keys[layer], kv.values[layer]
    kv_heads = keys.shape[1]
    each = 2 * (64 // (heads // kv_heads))  # rows of a block
    plan = torch.empty((rows // each + seats + 1, 4), dtype=torch.int32, device=queries.device)
    list_blocks[(seats, triton.cdiv(rows, LISTED * each))](
        row_starts,
        positions,
        page_table,
        row_starts if lanes is None else lanes,  # a placeholder is never read
        values,
        plan,
        page_table.shape[1],
        seats,
        EACH=each,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=PAGE_SIZE,
        LANES=lanes is not None,
        SEATS=triton.next_power_of_2(seats + 1),
        LISTED=LISTED,
    )
    boxes = [_boxes(memory) for memory in (keys, values)]
    processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
    _prefill[(processors,)](
        queries,
        *boxes,
        out,
        positions,
        page_table,
        plan,
        page_table.shape[1],
        scale,
        window,
        keys.shape[0] * kv_heads * PAGE_SIZE,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        TILE=tile,
        TILES=tiles,
        STAGES=stages or min(4, (SHARED - 256 * head_dim) // (4 * tile * head_dim)),
        PAGE=PAGE_SIZE,
        WINDOW=window > 0,
        num_warps=4,
    )


def _boxes(memory: Tensor) -> TensorDescriptor:
    """Describe a layer's keys or values as rows of head_dim numbers, copied by boxes of a page times 64 columns."""
    return TensorDescriptor.from_tensor(memory.view(-1, memory.shape[-1]), [PAGE_SIZE, WIDTH], BOX)


@gluon.jit
def _page_row(table, tile, j, end, head, beyond, KV_HEADS: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):
    """Return the row of the KV memory at which page `j` of a tile begins; past the end, one `beyond` the memory."""
    page = tile * (TILE // PAGE) + j
    inside = page * PAGE < end
    known = gl.load(table + page, mask=inside, other=0)
    return gl.where(inside, (known * KV_HEADS + head) * PAGE, beyond)


@gluon.jit
def _page_rows(table, tile, end, head, beyond, KV_HEADS: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):
    """Return the rows at which the eight pages of a tile begin."""
    return (
        _page_row(table, tile, 0, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 1, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 2, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 3, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 4, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 5, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 6, end, head, beyond, KV_HEADS, TILE, PAGE),
        _page_row(table, tile, 7, end, head, beyond, KV_HEADS, TILE, PAGE),
    )


@gluon.jit
def _load(
    boxes, page_table, plan, count, pages, window, beyond, memory, ready, free,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Copy the keys, or the values, of all tiles of this program's blocks, as stages of shared memory become free."""
    HALVES: gl.constexpr = HEAD_DIM // WIDTH
    done = 0
    for turn in range(rounds_of(count, KV_HEADS)):
        head, _, rows, lane, low, first, past = block_of(plan, turn, count, window, KV_HEADS, TILE, WINDOW)
        table = page_table + lane.to(gl.int64) * pages
        end = low + rows
        at = _page_rows(table, first, end, head, beyond, KV_HEADS, TILE, PAGE)
        for tile in range(first, past):
            stage, phase = done % STAGES, (done // STAGES) & 1
            done += 1
            following = _page_rows(table, tile + 1, end, head, beyond, KV_HEADS, TILE, PAGE)  # early
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(ready.index(stage), TILE * HEAD_DIM * 2)
            for j in gl.static_range(TILE // PAGE):
                for half in gl.static_range(HALVES):
                    box = memory.index(stage * HALVES + half).slice(j * PAGE, PAGE)
                    tma.async_copy_global_to_shared(boxes, [at[j], half * WIDTH], ready.index(stage), box)
            at = following


@gluon.jit
def _weigh(raw, peak, total, scale):
    """Turn scores into weights: `added` of attend.py up to its product."""
    higher = gl.maximum(peak, gl.max(raw, 1) * scale)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    old = gl.exp2(peak - safe)
    weights = gl.exp2(gl.fma(raw, scale, gl.expand_dims(-safe, 1)))
    steps = gl.sum((weights + 2.0).to(gl.int32, bitcast=True), 1)
    total = gl.fma(total, old, steps.to(gl.float32) * (1.0 / 4194304))
    return weights, old, higher, total


@gluon.jit
def _merge(peak, total, acc, peak_, total_, acc_, OUT: gl.constexpr):
    """Merge two partials, as `merged` of attend.py does."""
    higher = gl.maximum(peak, peak_)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    old, new = gl.exp2(peak - safe), gl.exp2(peak_ - safe)
    total = gl.fma(total, old, total_ * new)
    old, new = gl.convert_layout(old, OUT), gl.convert_layout(new, OUT)
    return higher, total, gl.fma(acc, gl.expand_dims(old, 1), acc_ * gl.expand_dims(new, 1))


@gluon.jit
def _seen(raw, place, tile, low, rows, window, TILE: gl.constexpr, SCORES: gl.constexpr, WINDOW: gl.constexpr):
    """Mask scores that a row does not see. Tiles that all rows of the block see, from `low` on, need no mask."""
    edge = tile * TILE + TILE > low + 1
    if WINDOW:
        edge = edge | (tile * TILE + window < low + rows)
    if edge:
        n = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        distance = gl.expand_dims(place, 1) - gl.expand_dims(n, 0)
        seen = distance >= 0
        if WINDOW:
            seen = seen & (distance < window)
        raw = gl.where(seen, raw, float("-inf"))
    return raw


@gluon.jit
def _attend(
    which: gl.constexpr, queries, out, positions, plan, count, scale, window, q_mem, k_mem, v_mem,
    k_ready, v_ready, k_free, v_free,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Compute 64 rows of each block of this program: `which` half of it."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    ROWS: gl.constexpr = 64 // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT: gl.constexpr = gl.SliceLayout(1, SUMS)
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    done = 0
    zero = gl.full([64, TILE], 0.0, gl.float32, SCORES)
    for turn in range(rounds_of(count, KV_HEADS)):
        head, start, rows, _, low, first, past = block_of(plan, turn, count, window, KV_HEADS, TILE, WINDOW)
        m = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
        d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
        row = which * ROWS + m // GROUP
        valid = (m // GROUP < ROWS) & (row < rows)
        cell = ((start + row).to(gl.int64) * HEADS + head * GROUP + m % GROUP) * HEAD_DIM
        q = gl.load(queries + gl.expand_dims(cell, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(valid, 1), other=0.0)
        q_mem.store(q)
        fence_async_shared()
        m = gl.arange(0, 64, layout=ROW)
        row = which * ROWS + m // GROUP
        place = gl.load(positions + start + row, mask=(m // GROUP < ROWS) & (row < rows), other=-1)
        whole_peak = gl.full([64], float("-inf"), gl.float32, ROW)
        whole_total = gl.full([64], 0.0, gl.float32, ROW)
        whole = gl.full([64, HEAD_DIM], 0.0, gl.float32, SUMS)
        peak, total, acc = whole_peak, whole_total, whole
        for tile in range(first, past):
            stage, phase = done % STAGES, (done // STAGES) & 1
            done += 1
            mbarrier.wait(k_ready.index(stage), phase)
            raw = warpgroup_mma(q_mem, k_mem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            if (tile % TILES == 0) & (tile > first):  # a split ended
                whole_peak, whole_total, whole = _merge(whole_peak, whole_total, whole, peak, total, acc, OUT)
                peak = gl.full([64], float("-inf"), gl.float32, ROW)  # its weight is 0: acc starts anew
                total = gl.full([64], 0.0, gl.float32, ROW)
            raw = warpgroup_mma_wait(0, deps=[raw])
            mbarrier.arrive(k_free.index(stage), count=1)
            raw = _seen(raw, place, tile, low, rows, window, TILE, SCORES, WINDOW)
            weights, old, peak, total = _weigh(raw, peak, total, scale)
            acc = acc * gl.expand_dims(gl.convert_layout(old, OUT), 1)
            weights = gl.convert_layout(weights.to(gl.bfloat16), P)
            mbarrier.wait(v_ready.index(stage), phase)
            acc = warpgroup_mma(weights, v_mem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(stage), count=1)
        whole_peak, whole_total, whole = _merge(whole_peak, whole_total, whole, peak, total, acc, OUT)
        safe = gl.convert_layout(gl.where(whole_total == 0.0, 1.0, whole_total), OUT)
        m = gl.arange(0, 64, layout=OUT)
        d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
        row = which * ROWS + m // GROUP
        valid = (m // GROUP < ROWS) & (row < rows)
        cell = ((start + row).to(gl.int64) * HEADS + head * GROUP + m % GROUP) * HEAD_DIM
        mean = (whole / gl.expand_dims(safe, 1)).to(gl.bfloat16)
        gl.store(out + gl.expand_dims(cell, 1) + gl.expand_dims(d, 0), mean, mask=gl.expand_dims(valid, 1))


@gluon.jit(do_not_specialize=["pages", "window", "beyond"])
def _prefill(
    queries,
    k_boxes,
    v_boxes,
    out,
    positions,
    page_table,
    plan,
    pages,
    scale,
    window,
    beyond,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    WIDTH: gl.constexpr = k_boxes.block_shape[1]
    HALVES: gl.constexpr = HEAD_DIM // WIDTH
    BOX: gl.constexpr = k_boxes.layout
    count = gl.load(plan)
    q_mem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, HEAD_DIM], BOX)
    k_halves = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, TILE, WIDTH], BOX)
    v_halves = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, TILE, WIDTH], BOX)
    k_mem = k_halves._reinterpret(gl.bfloat16, [STAGES, TILE, HEAD_DIM], BOX)  # columns are stored by halves
    v_mem = v_halves._reinterpret(gl.bfloat16, [STAGES, TILE, HEAD_DIM], BOX)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), queries, out, positions, plan, count, scale, window, q_mem.index(0), k_mem, v_mem,
                k_ready, v_ready, k_free, v_free, HEADS, KV_HEADS, HEAD_DIM, TILE, TILES, STAGES, WINDOW,
            )),
            (_attend, (
                gl.constexpr(1), queries, out, positions, plan, count, scale, window, q_mem.index(1), k_mem, v_mem,
                k_ready, v_ready, k_free, v_free, HEADS, KV_HEADS, HEAD_DIM, TILE, TILES, STAGES, WINDOW,
            )),
            (_load, (
                k_boxes, page_table, plan, count, pages, window, beyond, k_halves, k_ready, k_free,
                KV_HEADS, HEAD_DIM, TILE, STAGES, PAGE, WINDOW, WIDTH,
            )),
            (_load, (
                v_boxes, page_table, plan, count, pages, window, beyond, v_halves, v_ready, v_free,
                KV_HEADS, HEAD_DIM, TILE, STAGES, PAGE, WINDOW, WIDTH,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip  # a name a line would hide the shape
