"""`tree_layout`, `tree_accept` and the move of accepted nodes on a CUDA device; `tree_reference` defines them.

Each is one launch, with a program for each seat; the move has one for each seat, layer and KV head. Trees are small:
a program holds the matrix of who is on whose path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.noise import mix
from paceline.kernels.quant import FP8
from paceline.kernels.tree_reference import TreeLanes
from paceline.sampling.sampler import Stream

_PAGE_SIZE = tl.constexpr(PAGE_SIZE)
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
PADDING_EACH = 64  # rows of padding that are written at once
LEAST_SEATS = 32  # seats that a kernel is compiled for, at least: fewer take as long


def tree_layout(
    state: TreeLanes,
    *,
    seats: Tensor,
    counts: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    owners: Tensor,
    row_starts: Tensor,
    bases: Tensor,
    tails: Tensor,
    leads: Tensor,
    ancestors: Tensor,
    pdl: bool = False,
) -> None:
    """Make the rows of a verification of trees of at most `tails.shape[1]` nodes; see `tree_reference`."""
    assert len(seats) <= len(tokens), f"{len(seats)} seats in {len(tokens)} rows"
    assert all(x.is_contiguous() for x in (tails, ancestors)), "the rows of a table must be adjacent"
    assert tails.shape[1] <= state.parents.shape[1], f"trees of {tails.shape[1]} nodes"
    members = triton.next_power_of_2(tails.shape[1] + 1)
    _tree_layout[(len(seats) + 1,)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.pages,
        state.pages.stride(0),
        state.parents,
        state.parents.stride(0),
        state.lengths,
        state.dummy,
        seats,
        counts,
        tokens,
        positions,
        slots,
        owners,
        row_starts,
        bases,
        tails,
        leads,
        ancestors,
        tails.shape[1],
        len(seats),
        len(tokens),
        SEATS=max(LEAST_SEATS, triton.next_power_of_2(len(seats))),
        MEMBERS=members,
        PADDING=PADDING_EACH,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1 if members <= 16 else 4,
    )


def tree_accept(
    state: TreeLanes,
    *,
    seats: Tensor,
    row_starts: Tensor,
    targets: Tensor,
    out: Tensor,
    verdicts: Tensor | None = None,
    synthetic_acceptance: float = 0.0,
    pdl: bool = False,
) -> None:
    """Commit the path of each tree that the target agrees with, and its own token after it; see `tree_reference`."""
    longest = out.shape[1] // 4 - 1
    assert out.is_contiguous(), "the rows of `out` must be adjacent"
    _tree_accept[(len(seats),)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.parents,
        state.parents.stride(0),
        state.lengths,
        state.seed,
        state.dummy,
        seats,
        row_starts,
        targets,
        len(targets),
        out,
        longest,
        int(synthetic_acceptance * 2**24),
        seats if verdicts is None else verdicts,
        STEPS=triton.next_power_of_2(longest + 1),
        SYNTHETIC=synthetic_acceptance > 0,
        DECIDED=verdicts is not None and synthetic_acceptance <= 0,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


def tree_move(state: TreeLanes, kv: CudaKV, *, seats: Tensor, out: Tensor, pdl: bool = False) -> None:
    """Move keys and values of accepted nodes to the slots of their positions, in all layers; see `tree_moves`."""
    layers, _, kv_heads, _, head_dim = kv.keys.shape
    keys, values = (x.view(torch.uint8) if x.dtype == FP8 else x for x in (kv.keys, kv.values))
    assert all(x.is_contiguous() for x in (keys, values)), "KV memory is one piece"
    longest = out.shape[1] // 4 - 1
    _tree_move[(len(seats), layers, kv_heads)](
        keys,
        values,
        keys.stride(0),
        state.pages,
        state.pages.stride(0),
        state.tokens.shape[1],
        seats,
        out,
        longest,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        STEPS=triton.next_power_of_2(longest),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=2,
    )


@triton.jit
def _parent_rows(parents, member, mask):
    """Load the row of each member's parent, counted from the seat's first row; 0 for the first row itself."""
    parent = tl.load(parents + member - 1, mask=mask & (member > 0), other=-1)
    return tl.maximum(tl.minimum(parent, member - 2), -1) + 1


@triton.jit
def _slots_of(table, at):
    page = tl.load(table + at // _PAGE_SIZE)
    return page * _PAGE_SIZE + at % _PAGE_SIZE


@triton.jit(do_not_specialize=["dummy", "most", "seat_count", "row_count"])
def _tree_layout(
    lane_tokens,
    tokens_stride,
    width,
    pages,
    pages_stride,
    parents,
    parents_stride,
    lengths,
    dummy,
    seats,
    counts,
    tokens,
    positions,
    slots,
    owners,
    row_starts,
    bases,
    tails,
    leads,
    ancestors,
    most,
    seat_count,
    row_count,
    SEATS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    seat = tl.arange(0, SEATS)
    real = seat < seat_count
    extra = tl.maximum(tl.load(counts + seat, mask=real, other=1) - 1, 0)
    room = row_count - seat_count - (tl.cumsum(extra, axis=0) - extra)
    count = tl.where(real, 1 + tl.minimum(extra, tl.maximum(room, 0)), 0)
    if b == seat_count:
        tl.store(counts + seat, count, mask=real)  # other programs may read old or new ones: cutting twice is the same
        tl.store(row_starts + 1 + seat, tl.cumsum(count, axis=0), mask=real)
        tl.store(row_starts, 0)
        page = tl.load(pages + dummy.to(tl.int64) * pages_stride)
        for first in range(tl.sum(count, axis=0), row_count, PADDING):
            row = first + tl.arange(0, PADDING)
            inside = row < row_count
            zero = row * 0
            tl.store(tokens + row, zero, mask=inside)
            tl.store(positions + row, zero, mask=inside)
            tl.store(slots + row, zero + page * _PAGE_SIZE, mask=inside)
            tl.store(owners + row, zero + dummy, mask=inside)
            tl.store(leads + row, row, mask=inside)
            for column in range(most):
                tl.store(ancestors + row.to(tl.int64) * most + column, zero - 1, mask=inside)
        return

    start = tl.sum(tl.where(seat < b, count, 0), axis=0)
    mine = tl.sum(tl.where(seat == b, count, 0), axis=0)
    lane = tl.load(seats + b)
    length = tl.load(lengths + lane)
    wide = lane.to(tl.int64)
    parents += wide * parents_stride
    table = pages + wide * pages_stride
    member = tl.arange(0, MEMBERS)  # row of the seat; 0 is the last committed token
    inside = member < mine
    column = tl.minimum(length - 1 + member, width - 1)
    slot = _slots_of(table, column)
    token = tl.load(lane_tokens + wide * tokens_stride + column)
    tl.store(tokens + start + member, token, mask=inside)
    tl.store(slots + start + member, slot, mask=inside)
    tl.store(owners + start + member, member * 0 + lane, mask=inside)
    tl.store(bases + b, length)

    parent = _parent_rows(parents, member, inside)
    at, depth = member, member * 0
    path = member[:, None] == member[None, :]  # [row, other]: whether the other is on its path
    for _ in range(mine - 1):
        depth += (at > 0).to(tl.int32)
        at = tl.sum(tl.where(at[:, None] == member[None, :], parent[None, :], 0), axis=1)
        path = path | (at[:, None] == member[None, :])
    tl.store(positions + start + member, tl.minimum(length - 1 + depth, width - 1), mask=inside)
    deep = tl.sum(tl.where(member[:, None] == member[None, :], depth[:, None], 0), axis=0)  # depth of the other
    own = ancestors + (start + member).to(tl.int64)[:, None] * most
    there = path & inside[:, None] & (member > 0)[None, :]
    tl.store(own + (deep - 1)[None, :], tl.broadcast_to(token[None, :], [MEMBERS, MEMBERS]), mask=there)
    beyond = inside[:, None] & (member[None, :] >= depth[:, None]) & (member < most)[None, :]
    tl.store(own + member[None, :], tl.full([MEMBERS, MEMBERS], -1, tl.int32), mask=beyond)
    node = inside & (member > 0)
    children = tl.sum(((parent[None, :] == member[:, None]) & node[None, :]).to(tl.int32), axis=1)
    leaf = inside & (children == 0)
    order = tl.cumsum(leaf.to(tl.int32), axis=0) - 1  # of leaves
    cell = (start + order).to(tl.int64)[:, None] * most + (deep - 1)[None, :]
    on_path = path & leaf[:, None] & (member > 0)[None, :]
    tl.store(tails + cell, tl.broadcast_to(slot[None, :], [MEMBERS, MEMBERS]), mask=on_path)
    lead = tl.min(tl.where(path & leaf[:, None], order[:, None], MEMBERS), axis=0)
    tl.store(leads + start + member, start + lead, mask=inside)


@triton.jit(do_not_specialize=["dummy", "rows", "longest", "heads"])
def _tree_accept(
    tokens,
    stride,
    width,
    parents,
    parents_stride,
    lengths,
    seed,
    dummy,
    seats,
    starts,
    targets,
    rows,
    out,
    longest,
    heads,
    verdicts,
    STEPS: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    DECIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    lane = tl.load(seats + b)
    if lane == dummy:
        entry = tl.arange(0, 4 * STEPS)
        tl.store(out + b * (4 * longest + 4) + entry, entry * 0, mask=entry < 4 * longest + 4)
        return
    length = tl.load(lengths + lane)
    start = tl.load(starts + b)
    drafted = tl.minimum(tl.load(starts + b + 1) - start - 1, longest)
    node = tl.arange(0, STEPS)
    there = node < drafted
    mine = tokens + lane.to(tl.int64) * stride
    ahead = tl.load(mine + length + node, mask=there & (length + node < width), other=0)
    judged = tl.load(targets + start + node, mask=(node <= drafted) & (start + node < rows), other=0)
    parent = _parent_rows(parents + lane.to(tl.int64) * parents_stride, node + 1, there) - 1
    if SYNTHETIC:  # coins of 24 random bits, by depth
        coins = ((mix(tl.load(seed + lane), length + node, _ACCEPT) >> 40).to(tl.int32) < heads).to(tl.int32)
    if DECIDED:
        verdict = tl.load(verdicts + 2 * b)
        lives, above = node < 0, verdict - 1
        for _ in range(drafted):
            lives = lives | (node == above)
            above = tl.sum(tl.where(node == above, parent + 1, 0), axis=0) - 1  # of the root: the root
    at, accepted = length * 0 - 1, length * 0
    going = length >= 0
    path, new = node * 0, node * 0
    for step in range(drafted):
        right = ahead == tl.sum(tl.where(node == at + 1, judged, 0), axis=0)
        if SYNTHETIC:
            right = (node >= 0) & (tl.sum(tl.where(node == step, coins, 0), axis=0) > 0)
        if DECIDED:
            right = tl.where(verdict >= 0, lives, right)
        child = tl.min(tl.where(there & (parent == at) & right, node, STEPS), axis=0)
        going = going & (child < STEPS)
        token = tl.sum(tl.where(node == child, ahead, 0), axis=0)
        path = tl.where((node == step) & going, child, path)
        new = tl.where((node == step) & going, token, new)
        at = tl.where(going, child, at)
        accepted += going.to(tl.int32)
    own = tl.sum(tl.where(node == at + 1, judged, 0), axis=0)
    if DECIDED:
        own = tl.where(verdict >= 0, tl.load(verdicts + 2 * b + 1), own)
    new = tl.where(node == accepted, own, new)
    row = out + b * (4 * longest + 4)
    tl.store(row, accepted)
    tl.store(row + 1, drafted)
    tl.store(row + 2 + node, new, mask=node <= longest)
    tl.store(row + 3 + longest + node, ahead, mask=node < longest)
    tl.store(row + 3 + 2 * longest, length + accepted + 1)
    tl.store(row + 4 + 2 * longest + node, path, mask=node < longest)
    tl.store(row + 4 + 3 * longest + node, tl.where(there, parent, 0), mask=node < longest)
    tl.debug_barrier()  # the draft has been read before the path replaces it
    tl.store(mine + length + node, new, mask=(node <= accepted) & (length + node < width))
    tl.store(lengths + lane, length + accepted + 1)


@triton.jit(do_not_specialize=["longest"])
def _tree_move(
    keys,
    values,
    layer_stride,
    pages,
    pages_stride,
    width,
    seats,
    out,
    longest,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    step = tl.arange(0, STEPS)
    row = out + b * (4 * longest + 4)
    accepted = tl.load(row)
    path = tl.load(row + 4 + 2 * longest + step, mask=step < accepted, other=0)
    moved = (step < accepted) & (path != step)
    if tl.max(moved.to(tl.int32), axis=0) == 0:  # the usual case
        return
    start = tl.load(row + 3 + 2 * longest) - accepted - 1
    table = pages + tl.load(seats + b).to(tl.int64) * pages_stride
    base = tl.program_id(1).to(tl.int64) * layer_stride + tl.program_id(2) * (_PAGE_SIZE * HEAD_DIM)
    d = tl.arange(0, PADDED)
    source = _slots_of(table, tl.minimum(start + path, width - 1))
    target = _slots_of(table, tl.minimum(start + step, width - 1))
    source = base + ((source // _PAGE_SIZE).to(tl.int64) * (KV_HEADS * _PAGE_SIZE) + source % _PAGE_SIZE) * HEAD_DIM
    target = base + ((target // _PAGE_SIZE).to(tl.int64) * (KV_HEADS * _PAGE_SIZE) + target % _PAGE_SIZE) * HEAD_DIM
    mask = moved[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(keys + source[:, None] + d[None, :], mask=mask)
    v = tl.load(values + source[:, None] + d[None, :], mask=mask)
    tl.debug_barrier()  # all are read before any is written
    tl.store(keys + target[:, None] + d[None, :], k, mask=mask)
    tl.store(values + target[:, None] + d[None, :], v, mask=mask)
