"""Attention over pages: one order of sums for prefill, decoding and verification, chains and trees.

A program computes a block of adjacent rows of one sequence, with all query heads that share a KV head: together they
are the rows of its products. Positions are cut into tiles, and tiles are grouped into splits:

    positions   0 ┃ tile │ tile ┃ tile │ tile ┃ …      128 positions a tile, 64 if the head dimension is over 128
    splits        ┃      0      ┃      1      ┃        256 positions

The tiles of a split are added in order to one partial softmax (peak, total, acc), and the partials of all splits are
merged in order. Tiles and splits begin at fixed positions, and a tile that a row does not see leaves the row's state
unchanged to the bit. Weights are summed as whole numbers, exact in any order. So a row's result depends on its own
context alone: not on the batch, the division of work among programs, the size of a block, chain or tree.

The division of work only matters for speed. The programs of a block take adjacent splits each. If blocks alone fill the
device, one program takes all splits of its block. The program of a block that finishes last merges the partials in
scratch memory, so that one launch is enough. Prompts of many rows go to `prefill`, which computes the same bits.

In the tiles behind the base of a tree each path has slots of its own. The end of such a tile is read once for each
leaf, the rest once for all. Rows on a path see it in the order of a chain.

If all rows of a sequence are one block (decoding, verification), the kernel can also do the work of `rotate`, to the
same bits: a program rotates its queries, and stores the new keys and values of its splits before it reads them.

Each pass begins with a kernel that waits for all work before it, and only then lets the next one start (`embed`,
`pair`). So the layout of a pass is complete when attention starts, even if its queries are not. A program reads rows,
positions and pages while the product before it ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda import prefill
from paceline.kernels.cuda.division import Work, division, paths_of, splits_of
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.partials import (
    DEEP,
    NOBODY,
    add_tail,
    add_tile,
    keep,
    merge_splits,
    merged,
    nothing,
    on_path,
    settled,
    slots_of,
    write,
)
from paceline.kernels.cuda.rotate import narrowed, turned, whole
from paceline.kernels.quant import FP8, FP8_MAX

SPLIT = 256  # positions of a split
BLOCKS = (16, 32, 64, 128)  # sizes of a block: rows times query heads that share a KV head


@dataclass(frozen=True, slots=True)
class Rotation:
    """Inputs that let the attention kernel do the work of `rotate`."""

    slots: Tensor  # int32 [rows]
    cos: Tensor  # float32 [positions, head_dim / 2]
    sin: Tensor  # float32 [positions, head_dim / 2]
    parts: int = 1  # of the packed projection, that are not added yet


class Attention:
    """The kernel with its scratch memory: partials, and counters that are 0 between calls. Calls must not overlap."""

    def __init__(
        self,
        *,
        device: torch.device | str = "cuda",
        tile: int = 0,
        tiles: int = 0,
        fill: int = 0,
        warps: int = 0,
        stages: int = 0,
    ) -> None:
        """`tile`, positions, and `tiles` of a split (0: by the head dimension) fix the rounding of results; `fill`,
        `warps` and `stages` only change the speed (0: by the work)."""
        self.device = torch.device(device)
        self.tile, self.tiles, self.fill, self.warps, self.stages = tile, tiles, fill, warps, stages
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []  # captured graphs still point to them

    def __call__(
        self,
        queries: Tensor,
        kv: CudaKV,
        layer: int,
        *,
        row_starts: Tensor,
        positions: Tensor,
        page_table: Tensor,
        out: Tensor,
        seats: int,
        max_rows: int,
        max_context: int,
        scale: float,
        window: int = 0,
        lanes: Tensor | None = None,
        bases: Tensor | None = None,
        tails: Tensor | None = None,
        leads: Tensor | None = None,
        block_m: int = 16,
        rotation: Rotation | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """Compute `out`, attention of queries as Batch describes it, both [rows, heads, head_dim]. With a `rotation`,
        queries are the packed projection [rows, heads + 2 · kv_heads, head_dim], not rotated and not stored yet, or its
        parts, float32 [parts, …].

        `max_rows` bounds the rows of a sequence, `max_context` their positions + 1. The pages of a seat are
        page_table[lanes[seat]] with `lanes` [seats], otherwise page_table[seat]. Rows of no seat are not written. With
        `tails`, row r reads tails[leads[r]], as kernels/tree_reference.py describes it. With `pdl`, all but the queries
        must be complete when the launch before this one starts.
        """
        _, heads, head_dim = out.shape
        keys, values = kv.keys[layer], kv.values[layer]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        assert heads == group * kv_heads, f"{heads} heads cannot share {kv_heads} KV heads evenly"
        assert tails is None or (bases is not None and leads is not None and tails.is_contiguous()), (
            "a tree is all three"
        )
        assert all(x.is_contiguous() for x in (queries, out, row_starts, positions, page_table))
        tile = self.tile or tile_for(head_dim)
        tiles = self.tiles or SPLIT // tile
        shape = {"group": group, "tile": tile, "tiles": tiles, "max_rows": max_rows}
        if rotation is None and tails is None and prefill.fits(queries, kv, **shape):
            prefill.prefill(
                queries,
                kv,
                layer,
                row_starts=row_starts,
                positions=positions,
                page_table=page_table,
                out=out,
                seats=seats,
                scale=scale * math.log2(math.e),
                window=window,
                lanes=lanes,
                tile=tile,
            )
            return out
        block_m = max(16, block_m, triton.next_power_of_2(group))
        blocks = triton.cdiv(max_rows, block_m // group)
        assert rotation is None or blocks == 1, "only the rows of one block can be turned here"
        rotating = rotation or Rotation(row_starts, out, out)  # placeholders, never read
        padded = max(16, triton.next_power_of_2(head_dim))
        splits = splits_of(tile * tiles, max_context, window, block_m // group)
        count, work = seats * blocks * kv_heads, Work(block_m, head_dim, keys.itemsize)
        programs, warps, stages = division(count, splits, work, fill=self.fill)
        paths = 1 if tails is None else paths_of(count * programs, max_rows, fill=self.fill)
        solo = programs == 1
        if programs > 1:
            self.reserve(count, splits * block_m * (padded + 2), counters=count * paths)
        _attend[(seats * blocks, kv_heads, programs * paths)](
            queries,
            keys,
            values,
            out,
            row_starts,
            positions,
            page_table,
            row_starts if lanes is None else lanes,  # a placeholder is never read
            row_starts if bases is None else bases,
            row_starts if tails is None else tails,
            row_starts if leads is None else leads,
            rotating.slots,
            rotating.cos,
            rotating.sin,
            self.partials,
            self.counters,
            scale * math.log2(math.e),
            window,
            len(rotating.cos),
            page_table.shape[1],
            0 if tails is None else tails.shape[1],
            queries.numel() // rotating.parts,
            blocks,
            splits,
            paths,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PADDED=padded,
            BLOCK_M=block_m,
            TILE=tile,
            TILES=tiles,
            TAIL=0 if tails is None else min(tile, triton.next_power_of_2(DEEP.value - 1 + tails.shape[1])),
            PAGE=PAGE_SIZE,
            WINDOW=window > 0,
            LANES=lanes is not None,
            TREE=tails is not None,
            SOLO=solo,
            EARLY=programs in (1, splits) and not window,
            TURN=rotation is not None,
            PARTS=rotating.parts,
            LIMIT=FP8_MAX if keys.dtype == FP8 else 0.0,
            PDL=pdl,
            num_warps=(self.warps or warps) * (1 if block_m < 64 else 2),
            num_stages=self.stages or stages,
            launch_pdl=pdl,
        )
        return out

    def reserve(self, blocks: int, partial: int, *, counters: int) -> None:
        """Reserve scratch memory for `blocks` of `partial` floats each. It cannot grow while a graph is captured."""
        if self.counters.numel() < counters:
            self._outgrown.append(self.counters)
            self._may_grow()
            self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)
        if self.partials.numel() < blocks * partial:
            self._outgrown.append(self.partials)
            self._may_grow()
            self.partials = torch.empty(blocks * partial, dtype=torch.float32, device=self.device)

    def _may_grow(self) -> None:
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, "attention needs more scratch memory: make the same call once before capturing it"


def tile_for(head_dim: int) -> int:
    """Choose the positions of a tile: its keys and values of 16 bits take 64 KiB at most."""
    return 128 if head_dim <= 128 else 64


def block_for(group: int, max_rows: int, *, most: int = 32) -> int:
    """Choose the smallest block up to `most` that has room for `max_rows` rows of `group` query heads per KV head."""
    return next((block for block in BLOCKS if block >= most or block // group >= max_rows), most)


@triton.jit(  # they vary from call to call, and a compilation takes seconds
    do_not_specialize=["window", "angles", "pages", "depth", "splits", "paths"],
    do_not_specialize_on_alignment=["blocks", "tails"],
)
def _attend(
    queries, keys, values, out, row_starts, positions, page_table, lanes, bases, tails, leads, slots, cos, sin,
    partials, counters, scale, window, angles, pages, depth, size, blocks, splits, paths,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    LANES: tl.constexpr, TREE: tl.constexpr, SOLO: tl.constexpr, EARLY: tl.constexpr, TURN: tl.constexpr,
    PARTS: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = BLOCK_M // GROUP
    SPLIT: tl.constexpr = TILE * TILES
    seat = tl.program_id(0) // blocks
    head = tl.program_id(1)
    me = tl.program_id(2)
    programs = tl.num_programs(2)
    if TREE:
        mine = me % paths
        me //= paths
        programs //= paths
    begin = settled(row_starts + seat)
    start = begin + (tl.program_id(0) % blocks) * ROWS
    stop = settled(row_starts + seat + 1)
    lane = settled(lanes + seat) if LANES else seat
    table = page_table + lane.to(tl.int64) * pages
    if EARLY:  # the program begins with a known tile: its pages are the first of a chain of loads
        slot = slots_of(table, me * SPLIT + tl.arange(0, TILE), pages, PAGE, True)

    m = tl.arange(0, BLOCK_M)  # = (row - start) * GROUP + query head; the rest of the block is empty
    d = tl.arange(0, PADDED)
    row = start + m // GROUP
    valid = (m // GROUP < ROWS) & (row < stop)
    place = settled(positions + row, valid, -1)  # [BLOCK_M] positions
    cell = (row.to(tl.int64) * HEADS + head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    member = start + m
    new = (m < ROWS) & (member < stop)
    if TURN:
        at = settled(positions + member, new, 0)
        new_slot = settled(slots + member, new, -1)

    if TREE:  # rows on the paths of this program
        base = settled(bases + seat)
        lead = settled(leads + row, valid, NOBODY)
        valid = valid & ((lead - begin) % paths == mine)
        place = tl.where(valid, place, -1)
        lead = tl.where(valid, lead, NOBODY)
        mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    end = tl.max(place, 0) + 1  # past the last position of the block
    low = end * 0  # the first position that any of its rows sees
    if WINDOW:
        low = tl.maximum(tl.min(tl.where(valid, place, 1 << 30), 0) - window + 1, 0)
    first = low // SPLIT
    count = tl.minimum(tl.maximum(tl.cdiv(end, SPLIT) - first, 1), splits)
    each = tl.cdiv(count, programs)  # splits of a program
    from_ = tl.maximum((first + me * each) * TILES, low // TILE)
    past = tl.minimum((first + tl.minimum((me + 1) * each, count)) * TILES, tl.cdiv(end, TILE))
    keys += head * (PAGE * HEAD_DIM)
    values += head * (PAGE * HEAD_DIM)
    shared = past  # past the last tile whose slots all rows share
    if TREE:
        main = tl.min(lead, 0)
        forked = tl.max(tl.where(valid, lead, main), 0) > main
        shared = tl.minimum(tl.maximum(tl.where(forked & (base < end), base // TILE, past), from_), past)
        if EARLY:
            slot = on_path(slot, from_ * TILE + tl.arange(0, TILE), tails, main, end, base, depth)
    if PDL:
        tl.extra.cuda.gdc_wait()

    if TURN:
        source = (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head * GROUP + m % GROUP) * HEAD_DIM
        kind: tl.constexpr = out.dtype.element_ty
        q = turned(queries + source[:, None], place, valid, cos, sin, angles, size, kind, HEAD_DIM, PADDED, PARTS)
        new = new & ((at // SPLIT - first) // each == me) & (new_slot >= 0)
        source = (member.to(tl.int64) * (HEADS + 2 * KV_HEADS) + HEADS + head) * HEAD_DIM
        new_k = turned(queries + source[:, None], at, new, cos, sin, angles, size, kind, HEAD_DIM, PADDED, PARTS)
        stored = new[:, None] & (d < HEAD_DIM)[None, :]
        new_v = whole(queries + (source + KV_HEADS * HEAD_DIM)[:, None] + d[None, :], stored, size, kind, PARTS)
    else:
        q = tl.load(queries + cell, mask=mask, other=0.0)
    nobody = (tl.max(valid.to(tl.int32), 0) == 0) if TREE else (start >= stop)  # no row is on its paths, or of the seat
    if nobody | (me * each >= count):
        return
    if TURN:  # store the new rows of the positions that this program reads
        target = (new_slot // PAGE).to(tl.int64) * (KV_HEADS * PAGE) + new_slot % PAGE
        target = target[:, None] * HEAD_DIM + d[None, :]
        tl.store(keys + target, narrowed(new_k, keys, LIMIT), mask=stored)
        tl.store(values + target, narrowed(new_v, values, LIMIT), mask=stored)
        tl.debug_barrier()  # all threads have stored before any reads
    block = tl.program_id(0) * KV_HEADS + head
    counter = counters + block
    if TREE:
        counter = counters + block * paths + mine
    partials += block.to(tl.int64) * splits * (BLOCK_M * (PADDED + 2))

    whole_peak, whole_total, whole_acc = nothing(BLOCK_M, PADDED)
    peak, total, acc = nothing(BLOCK_M, PADDED)
    position = from_ * TILE + tl.arange(0, TILE)
    if not EARLY:
        slot = slots_of(table, position, pages, PAGE, False)
        if TREE:
            slot = on_path(slot, position, tails, main, end, base, depth)
    for tile in range(from_, shared):
        position = (tile + 1) * TILE + tl.arange(0, TILE)
        next_slot = slots_of(table, position, pages, PAGE, False)  # early: keys and values wait for it
        if TREE:
            next_slot = on_path(next_slot, position, tails, main, end, base, depth)
        if (tile % TILES == 0) & (tile > from_):  # a split ended
            if SOLO:
                whole_peak, whole_total, whole_acc = merged(whole_peak, whole_total, whole_acc, peak, total, acc)
            else:
                keep(partials, tile // TILES - 1 - first, valid, peak, total, acc, BLOCK_M, PADDED)
            peak, total, acc = nothing(BLOCK_M, PADDED)
        peak, total, acc = add_tile(
            tile, slot, q, keys, values, place, scale, window, end, peak, total, acc,
            KV_HEADS, HEAD_DIM, PADDED, TILE, PAGE, WINDOW,
        )  # fmt: skip  # a name a line would hide the shape
        slot = next_slot
    if TREE:
        for tile in range(shared, past):
            if (tile % TILES == 0) & (tile > from_):  # a split ended
                if SOLO:
                    whole_peak, whole_total, whole_acc = merged(whole_peak, whole_total, whole_acc, peak, total, acc)
                else:
                    keep(partials, tile // TILES - 1 - first, valid, peak, total, acc, BLOCK_M, PADDED)
                peak, total, acc = nothing(BLOCK_M, PADDED)
            peak, total, acc = add_tail(
                tile, slot, table, pages, q, keys, values, place, lead, tails, scale, window, depth, end, base,
                main, paths, peak, total, acc, KV_HEADS, HEAD_DIM, PADDED, TILE, TAIL, PAGE, WINDOW,
            )  # fmt: skip  # a name a line would hide the shape
            position = (tile + 1) * TILE + tl.arange(0, TILE)
            slot = slots_of(table, position, pages, PAGE, False)
            slot = on_path(slot, position, tails, main, end, base, depth)
    if SOLO | (count == 1):
        whole_peak, whole_total, whole_acc = merged(whole_peak, whole_total, whole_acc, peak, total, acc)
        write(out + cell, mask, whole_total, whole_acc)
        return
    if not SOLO:
        keep(partials, tl.maximum(past - 1, 0) // TILES - first, valid, peak, total, acc, BLOCK_M, PADDED)
        tl.debug_barrier()  # all threads have written before the counter says so
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == tl.cdiv(count, each) - 1:
            total, acc = merge_splits(partials, count, valid, BLOCK_M, PADDED)
            write(out + cell, mask, total, acc)
            tl.store(counter, 0)
