"""The plan of `prefill`: the blocks of all sequences in one list, and who computes which of them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LISTED = 32  # blocks that a program of the plan lists


@triton.jit(do_not_specialize=["pages", "seats"])
def list_blocks(
    row_starts,
    positions,
    page_table,
    lanes,
    values,
    plan,
    pages,
    seats,
    EACH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    SEATS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """List the blocks of all seats, those with the most context first: (first row, rows, lane, position) each.

    A program lists LISTED blocks of a seat; plan[0, 0] counts all. The first one also clears the seat's values between
    its end and the end of its last page, because 0 times NaN would be NaN.
    """
    seat = tl.program_id(0)
    start = tl.load(row_starts + seat)
    stop = tl.load(row_starts + seat + 1)
    s = tl.arange(0, SEATS)
    starts = tl.load(row_starts + s, mask=s < seats, other=0)
    blocks = tl.cdiv(tl.load(row_starts + s + 1, mask=s < seats, other=0) - starts, EACH)  # [SEATS] of each seat
    if (seat == 0) & (tl.program_id(1) == 0):
        tl.store(plan, tl.sum(blocks, 0))
    block = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    first = start + block * EACH
    if start + tl.program_id(1) * (LISTED * EACH) >= stop:
        return
    lane = tl.load(lanes + seat) if LANES else seat
    later = tl.maximum(blocks[None, :] - 1 - block[:, None], 0)  # blocks of each seat behind this one
    ahead = (s < seat)[None, :] & (blocks[None, :] > block[:, None])  # a block of that seat as far behind, listed first
    entry = plan + (1 + tl.sum(later + ahead.to(tl.int32), 1)) * 4
    mine = first < stop
    tl.store(entry, first, mask=mine)
    tl.store(entry + 1, tl.minimum(stop - first, EACH), mask=mine)
    tl.store(entry + 2, lane, mask=mine)
    tl.store(entry + 3, tl.load(positions + first, mask=mine, other=0), mask=mine)
    if tl.program_id(1) > 0:
        return
    end = tl.load(positions + stop - 1) + 1
    if end % PAGE != 0:
        page = tl.load(page_table + lane.to(tl.int64) * pages + end // PAGE).to(tl.int64)
        slot, d = tl.arange(0, PAGE), tl.arange(0, HEAD_DIM)
        for head in range(KV_HEADS):
            cell = ((page * KV_HEADS + head) * PAGE + slot)[:, None] * HEAD_DIM + d[None, :]
            zero = tl.zeros([PAGE, HEAD_DIM], values.dtype.element_ty)
            tl.store(values + cell, zero, mask=(slot >= end % PAGE)[:, None] & (d >= 0)[None, :])


@gluon.jit
def _item(turn):
    """Return the number of this program's item in round `turn`, over all blocks and KV heads.

    Rounds go to and fro over the programs, so that those with a heavier block now have a lighter one next.
    """
    programs = gl.num_programs(0)
    me = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, me, programs - 1 - me)


@gluon.jit
def blocks_of(count, KV_HEADS: gl.constexpr):
    """Count the blocks of this program: one for each round, but the last round may end before it."""
    rounds = (count * KV_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)
    return rounds - (_item(rounds - 1) >= count * KV_HEADS).to(gl.int32)


@gluon.jit
def block_of(plan, turn, count, KV_HEADS: gl.constexpr):
    """Read a block of this program: head, first row, rows, lane, position. Past the last one, it is empty."""
    there = _item(turn) < count * KV_HEADS
    item = gl.where(there, _item(turn), 0)
    entry = plan + (1 + item // KV_HEADS) * 4
    rows, low = gl.where(there, gl.load(entry + 1), 0), gl.where(there, gl.load(entry + 3), 0)
    return item % KV_HEADS, gl.load(entry), rows, gl.load(entry + 2), low


@gluon.jit
def tiles_of(low, rows, window, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Return the first tile of a block, at which a split of two begins, and the end of its tiles. An empty block has
    one tile."""
    first = low * 0
    if WINDOW:
        first = gl.maximum(low - window + 1, 0) // (2 * TILE) * 2
    return first, gl.maximum(low + rows + TILE - 1, TILE) // TILE
