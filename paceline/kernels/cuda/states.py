"""Hidden states that rounds hold for a head, on a CUDA device; `states_reference` defines `hold` and `take`.

`keep` copies the states at a tap out of a pass, because the residual stream goes on in the same memory. Each is one
launch, and programs write disjoint memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.round_reference import DeviceLanes
from paceline.kernels.states_reference import HeldStates, Taken

BLOCK = 2048  # columns per program
_PAGE_SIZE, _BLOCK = tl.constexpr(PAGE_SIZE), tl.constexpr(BLOCK)


def keep(x: Tensor, kept: Tensor, place: int, *, pdl: bool = False) -> None:
    """Copy x [rows, hidden] to columns [place · hidden, (place + 1) · hidden) of `kept` [rows, taps · hidden]."""
    rows, hidden = x.shape
    _keep[(rows, triton.cdiv(hidden, BLOCK))](
        x, kept, hidden, kept.stride(0), place * hidden, PDL=pdl, launch_pdl=pdl, num_warps=4
    )


def hold(
    held: HeldStates,
    state: DeviceLanes,
    *,
    seats: Tensor,
    starts: Tensor,
    outcomes: Tensor,
    features: Tensor,
    read: Tensor | None = None,
    tree: bool = False,
    pdl: bool = False,
) -> None:
    """Hold the states of the positions that `accept` has just committed; see `states_reference`."""
    longest = outcomes.shape[1] // 4 - 1 if tree else outcomes.shape[1] // 2 - 2
    _hold[(len(seats), 1 + longest, triton.cdiv(held.width, BLOCK))](
        held.states,
        held.ends,
        held.counts,
        state.lengths,
        state.dummy,
        seats,
        starts,
        outcomes,
        outcomes.stride(0),
        features,
        features.stride(0),
        seats if read is None else read,
        held.capacity,
        held.width,
        4 + 2 * longest,
        READ=read is not None,
        TREE=tree,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def take(
    held: HeldStates, state: DeviceLanes, *, seats: Tensor, limits: Tensor, most: int, into: Taken, pdl: bool = False
) -> None:
    """Lay out the last held rows of all seats that draft, for the head's first pass; see `states_reference`."""
    rows = len(into.tokens)
    assert len(seats) <= rows, f"{len(seats)} seats in {rows} rows"
    _take[(rows, triton.cdiv(held.width, BLOCK))](
        held.states,
        held.ends,
        held.counts,
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.pages,
        state.pages.stride(0),
        state.lengths,
        state.dummy,
        seats,
        limits,
        most,
        into.tokens,
        into.positions,
        into.slots,
        into.row_starts,
        into.features,
        into.confidence,
        into.found,
        into.later_positions,
        into.later_slots,
        len(into.later_positions),
        held.capacity,
        held.width,
        len(seats),
        rows,
        SEATS=triton.next_power_of_2(len(seats)),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["offset"])
def _keep(x, kept, hidden, stride, offset, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    value = tl.load(x + row * hidden + k, mask=k < hidden, other=0.0)
    tl.store(kept + row * stride + offset + k, value, mask=k < hidden)


@triton.jit(do_not_specialize=["dummy", "outcome_stride", "capacity", "path"])
def _hold(
    states,
    ends,
    counts,
    lengths,
    dummy,
    seats,
    starts,
    outcomes,
    outcome_stride,
    features,
    feature_stride,
    read,
    capacity,
    width,
    path,
    READ: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.program_id(1)
    lane = tl.load(seats + b).to(tl.int64)
    count = 1 + tl.load(outcomes + b * outcome_stride)
    end = tl.load(lengths + lane) - 1
    if lane != dummy:
        if (i < count) & (i >= count - capacity):
            k = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
            place = i
            if TREE:
                place = 1 + tl.load(outcomes + b * outcome_stride + path + i - 1, mask=i > 0, other=-1)
            row = (tl.load(starts + b) + place).to(tl.int64)
            value = tl.load(features + row * feature_stride + k, mask=k < width, other=0.0)
            place = lane * capacity + (end - count + i) % capacity
            tl.store(states + place * width + k, value, mask=k < width)
        if (i == 0) & (tl.program_id(2) == 0):
            before = tl.where(tl.load(ends + lane) == end - count, tl.load(counts + lane), 0)
            if READ:
                before = tl.where(tl.load(read + b) > 0, 0, before)
            tl.store(counts + lane, tl.minimum(count + before, capacity))
            tl.store(ends + lane, end)


@triton.jit(do_not_specialize=["dummy", "most", "capacity", "turns", "seat_count", "row_count"])
def _take(
    states,
    ends,
    counts,
    lane_tokens,
    tokens_stride,
    tokens_width,
    pages,
    pages_stride,
    lengths,
    dummy,
    seats,
    limits,
    most,
    tokens,
    positions,
    slots,
    row_starts,
    features,
    confidence,
    found,
    later_positions,
    later_slots,
    turns,
    capacity,
    width,
    seat_count,
    row_count,
    SEATS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.arange(0, SEATS)
    real = seat < seat_count
    lane = tl.load(seats + seat, mask=real, other=0)
    length = tl.load(lengths + lane, mask=real, other=0)
    count = tl.load(counts + lane, mask=real, other=0)
    there = real & (tl.load(ends + lane, mask=real, other=0) == length - 1) & (count > 0) & (lane != dummy)
    there = there & (tl.load(limits + seat, mask=real, other=0) > 0)
    wanted = tl.where(there, tl.minimum(count, most), 0)
    extra = tl.maximum(wanted - 1, 0)
    room = row_count - seat_count - (tl.cumsum(extra, axis=0) - extra)
    count = tl.minimum(wanted, 1 + tl.minimum(extra, tl.maximum(room, 0)))
    end = tl.cumsum(count, axis=0)  # [SEATS]

    row, part = tl.program_id(0), tl.program_id(1)
    passed = (end <= row) & real
    start = tl.max(tl.where(passed, end, 0), axis=0)
    mine = tl.sum(passed.to(tl.int32), axis=0)
    used = mine < seat_count
    here = seat == mine
    owner = tl.where(used, tl.sum(tl.where(here, lane, 0), axis=0), dummy).to(tl.int64)
    at = tl.sum(tl.where(here, length - 1 - count, 0), axis=0) + row - start
    at = tl.where(used, at, 0)
    k = part * _BLOCK + tl.arange(0, _BLOCK)
    place = owner * capacity + at % capacity
    value = tl.load(states + place * width + k, mask=used & (k < width), other=0.0)
    tl.store(features + row.to(tl.int64) * width + k, value, mask=k < width)
    if part == 0:
        token = tl.load(lane_tokens + owner * tokens_stride + at + 1, mask=used, other=0)
        page = tl.load(pages + owner * pages_stride + at // _PAGE_SIZE)
        tl.store(tokens + row, token)
        tl.store(positions + row, at)
        tl.store(slots + row, page * _PAGE_SIZE + at % _PAGE_SIZE)
        if row == 0:
            tl.store(row_starts, 0)
            tl.store(row_starts + 1 + seat, end, mask=real)
            tl.store(confidence + seat, tl.where(there, 1.0, -1.0), mask=real)
            tl.store(found + seat, 0, mask=real)
            for turn in range(turns):
                later = tl.minimum(length - 1 + turn, tokens_width - 1)
                where = pages + lane.to(tl.int64) * pages_stride + later // _PAGE_SIZE
                slot = tl.load(where, mask=real, other=0) * _PAGE_SIZE + later % _PAGE_SIZE
                tl.store(later_positions + turn * seat_count + seat, later, mask=real)
                tl.store(later_slots + turn * seat_count + seat, slot, mask=real)
