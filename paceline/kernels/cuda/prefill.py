"""Attention of prompts on Hopper, to the bits of `attend`: the same tiles, splits and sums, arranged for many rows.

One program runs on each multiprocessor. It takes blocks of rows of one sequence, with the query heads that share a KV
head, in turns. Its warps have four parts:

    2 x load    copies tiles of keys, or of values, from pages to shared memory, ahead of their use (TMA)
    2 x math    each computes 64 rows; they take turns, so that one has the tensor cores while the other weighs scores

The kernel is written in Gluon, which Triton's interpreter cannot run. `attend` is its twin: tests on a GPU compare
both bit by bit.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.prefill_plan import LISTED, block_of, list_blocks, rounds_of, tiles_of
from paceline.kernels.cuda.prefill_tile import add, await_tile, merge, score, scored

SHARED = 226 * 1024  # bytes of shared memory for queries, keys and values
MANY_ROWS = 64  # of a sequence: fewer leave most of a block empty
WIDTH = 64  # columns of a copied box: 128 bytes, the widest swizzle of shared memory
BOX = gl.NVMMASharedLayout(128, 16, 2)  # the layout of a box: swizzled by 128 bytes, elements of 16 bits


def fits(queries: Tensor, kv: CudaKV, *, group: int, tile: int, tiles: int, max_rows: int) -> bool:
    """Return whether the kernel can compute this: bf16 on Hopper, heads of 64 or 128, up to 64 of them on a KV head,
    tiles of eight pages, splits of two `tiles`."""
    on_hopper = queries.is_cuda and torch.cuda.get_device_capability(queries.device) == (9, 0)
    plain = queries.dtype == kv.keys.dtype == torch.bfloat16
    shaped = queries.shape[-1] in (64, 128) and (tile, tiles) == (8 * PAGE_SIZE, 2) and group <= 64
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
    stages: int = 0,
) -> None:
    """Compute `out` [rows, heads, head_dim]; the rows of a seat have adjacent positions. `scale` is in units of log2,
    `tile` in positions, `stages` tiles of shared memory (0: as many as there is room for)."""
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
        head, _, rows, lane, low = block_of(plan, turn, count, KV_HEADS)
        first, past = tiles_of(low, rows, window, TILE, 2 * TILE, WINDOW)
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
def _cells(which: gl.constexpr, head, start, rows, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
           LAYOUT: gl.constexpr):  # fmt: skip  # a name a line would hide the shape
    """Return where the 64 rows of half a block begin in queries and results, and which of them there are."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    row = which * (64 // GROUP) + m // GROUP
    cell = ((start + row).to(gl.int64) * HEADS + head * GROUP + m % GROUP) * HEAD_DIM
    valid = (m // GROUP < 64 // GROUP) & (row < rows)
    return gl.expand_dims(cell, 1) + gl.expand_dims(d, 0), gl.expand_dims(valid, 1)


@gluon.jit
def _fetch(
    which: gl.constexpr, queries, q_mem, head, start, rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Start to copy the queries of half a block to shared memory."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    cells, valid = _cells(which, head, start, rows, HEADS, KV_HEADS, HEAD_DIM, LOAD)
    async_copy.async_copy_global_to_shared(q_mem, queries + cells, mask=valid)
    async_copy.commit_group()


@gluon.jit
def _attend(
    which: gl.constexpr, queries, out, plan, count, scale, window, q_mem, k_mem, v_mem,
    k_ready, v_ready, free, turns,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Compute 64 rows of each block of this program: `which` half of it."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT: gl.constexpr = gl.SliceLayout(1, SUMS)
    keys, values = (k_mem, k_ready), (v_mem, v_ready)
    done = 0  # tiles of all blocks so far, and turns at the tensor cores
    head, start, rows, _, low = block_of(plan, 0, count, KV_HEADS)
    _fetch(which, queries, q_mem, head, start, rows, HEADS, KV_HEADS, HEAD_DIM)
    for turn in range(rounds_of(count, KV_HEADS)):
        head_, start_, rows_, _, low_ = block_of(plan, turn + 1, count, KV_HEADS)  # the next block, early
        first, past = tiles_of(low, rows, window, TILE, 2 * TILE, WINDOW)
        m = gl.arange(0, 64, layout=ROW)
        row = which * (64 // GROUP) + m // GROUP
        block = (gl.where((m // GROUP < 64 // GROUP) & (row < rows), low + row, -1), low, rows)
        none = gl.full([64], float("-inf"), gl.float32, ROW)
        zero = gl.full([64], 0.0, gl.float32, ROW)
        whole_peak, whole_total, whole = none, zero, gl.full([64, HEAD_DIM], 0.0, gl.float32, SUMS)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        if past > first:
            acc = whole
            await_tile(keys, done, STAGES)
            raw = scored(score(q_mem, keys, done, TILE, STAGES))
            peak, total = none, zero
            for tile in range(first, past - 1):
                raw, peak, total, acc = add(
                    which, True, raw, peak, total, acc, done, tile, block,
                    q_mem, keys, values, free, turns, scale, window, HEAD_DIM, TILE, STAGES, WINDOW,
                )  # fmt: skip
                if tile % 2 == 1:  # a split ends
                    whole_peak, whole_total, whole = merge(whole_peak, whole_total, whole, peak, total, acc, OUT)
                    peak, total = none, zero
                raw = scored(raw)
                done += 1
            _fetch(which, queries, q_mem, head_, start_, rows_, HEADS, KV_HEADS, HEAD_DIM)
            raw, peak, total, acc = add(
                which, False, raw, peak, total, acc, done, past - 1, block,
                q_mem, keys, values, free, turns, scale, window, HEAD_DIM, TILE, STAGES, WINDOW,
            )  # fmt: skip
            done += 1
            whole_peak, whole_total, whole = merge(whole_peak, whole_total, whole, peak, total, acc, OUT)
        safe = gl.convert_layout(gl.where(whole_total == 0.0, 1.0, whole_total), OUT)
        mean = (whole * gl.expand_dims(1.0 / safe, 1)).to(gl.bfloat16)
        cells, valid = _cells(which, head, start, rows, HEADS, KV_HEADS, HEAD_DIM, SUMS)
        gl.store(out + cells, mean, mask=valid)
        head, start, rows, low = head_, start_, rows_, low_


@gluon.jit(do_not_specialize=["pages", "window", "beyond"])
def _prefill(
    queries,
    k_boxes,
    v_boxes,
    out,
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
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # of both keys and values
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), queries, out, plan, count, scale, window, q_mem.index(0), k_mem, v_mem,
                k_ready, v_ready, free, turns, HEADS, KV_HEADS, HEAD_DIM, TILE, STAGES, WINDOW,
            )),
            (_attend, (
                gl.constexpr(1), queries, out, plan, count, scale, window, q_mem.index(1), k_mem, v_mem,
                k_ready, v_ready, free, turns, HEADS, KV_HEADS, HEAD_DIM, TILE, STAGES, WINDOW,
            )),
            (_load, (
                k_boxes, page_table, plan, count, pages, window, beyond, k_halves, k_ready, free,
                KV_HEADS, HEAD_DIM, TILE, STAGES, PAGE, WINDOW, WIDTH,
            )),
            (_load, (
                v_boxes, page_table, plan, count, pages, window, beyond, v_halves, v_ready, free,
                KV_HEADS, HEAD_DIM, TILE, STAGES, PAGE, WINDOW, WIDTH,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip  # a name a line would hide the shape
