"""`layout`, `accept` and `push` of a round on a CUDA device; `round_reference` defines them.

Each is one launch. Lengths, tokens and pages are read and written in the device's memory, so that a captured round
needs nothing from the host. Programs write disjoint memory, except for seats of the dummy lane, which commit nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.noise import mix
from paceline.kernels.round_reference import DeviceLanes
from paceline.sampling.sampler import Stream

_PAGE_SIZE = tl.constexpr(PAGE_SIZE)
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
ROWS_EACH = 32  # rows per program of `_layout`


def layout(
    state: DeviceLanes,
    *,
    seats: Tensor,
    counts: Tensor,
    first: int,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    owners: Tensor,
    row_starts: Tensor,
    pdl: bool = False,
) -> None:
    """Make the rows of a pass: seat b gets `counts[b]` tokens from its length + `first` on; see `round_reference`."""
    assert len(seats) <= len(tokens), f"{len(seats)} seats in {len(tokens)} rows"
    _layout[(triton.cdiv(len(tokens), ROWS_EACH),)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.pages,
        state.pages.stride(0),
        state.lengths,
        state.dummy,
        seats,
        counts,
        first,
        tokens,
        positions,
        slots,
        owners,
        row_starts,
        len(seats),
        len(tokens),
        SEATS=triton.next_power_of_2(len(seats)),
        ROWS=ROWS_EACH,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def accept(
    state: DeviceLanes,
    *,
    seats: Tensor,
    targets: Tensor,
    out: Tensor,
    row_starts: Tensor | None = None,
    roots: Tensor | None = None,
    verdicts: Tensor | None = None,
    synthetic_acceptance: float = 0.0,
    pdl: bool = False,
) -> None:
    """Commit the drafted tokens that the target agrees with, and its own token after them; see `round_reference`."""
    starts = row_starts if roots is None else roots
    assert starts is not None, "either row_starts or roots must be given"
    longest = out.shape[1] // 2 - 2
    assert out.is_contiguous(), "the rows of `out` must be adjacent"
    _accept[(len(seats),)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.lengths,
        state.seed,
        state.dummy,
        seats,
        starts,
        targets,
        len(targets),
        out,
        longest,
        int(synthetic_acceptance * 2**24),
        seats if verdicts is None else verdicts,
        STEPS=triton.next_power_of_2(longest + 1),
        ROOTED=roots is not None,
        SYNTHETIC=synthetic_acceptance > 0,
        DECIDED=verdicts is not None and synthetic_acceptance <= 0,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


def push(state: DeviceLanes, *, seats: Tensor, tokens: Tensor, offset: int, pdl: bool = False) -> None:
    """Write tokens [seats] at `offset` behind the committed tokens."""
    _push[(1,)](
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        state.lengths,
        seats,
        tokens,
        offset,
        len(seats),
        SEATS=triton.next_power_of_2(len(seats)),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first", "dummy", "seat_count", "row_count"])
def _layout(
    lane_tokens,
    tokens_stride,
    width,
    pages,
    pages_stride,
    lengths,
    dummy,
    seats,
    counts,
    first,
    tokens,
    positions,
    slots,
    owners,
    row_starts,
    seat_count,
    row_count,
    SEATS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.arange(0, SEATS)
    real = seat < seat_count
    extra = tl.maximum(tl.load(counts + seat, mask=real, other=1) - 1, 0)
    room = row_count - seat_count - (tl.cumsum(extra, axis=0) - extra)
    count = tl.where(real, 1 + tl.minimum(extra, tl.maximum(room, 0)), 0)
    end = tl.cumsum(count, axis=0)  # [SEATS]
    if tl.program_id(0) == 0:  # other programs may read old or new counts: cutting twice changes nothing
        tl.store(counts + seat, count, mask=real)
        tl.store(row_starts + 1 + seat, end, mask=real)
        tl.store(row_starts, 0)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < row_count
    passed = (end[None, :] <= row[:, None]) & real[None, :]  # [ROWS, SEATS]
    mine = tl.sum(passed.to(tl.int32), axis=1)
    start = tl.max(tl.where(passed, end[None, :], 0), axis=1)
    used = inside & (mine < seat_count)
    owner = tl.load(seats + mine, mask=used, other=0)
    owner = tl.where(used, owner, dummy)
    at = tl.load(lengths + owner, mask=used, other=0) + first + row - start
    at = tl.where(used, tl.minimum(tl.maximum(at, 0), width - 1), 0)
    wide = owner.to(tl.int64)
    token = tl.load(lane_tokens + wide * tokens_stride + at, mask=used, other=0)
    page = tl.load(pages + wide * pages_stride + at // _PAGE_SIZE, mask=inside, other=0)
    tl.store(tokens + row, token, mask=inside)
    tl.store(positions + row, at, mask=inside)
    tl.store(slots + row, page * _PAGE_SIZE + at % _PAGE_SIZE, mask=inside)
    tl.store(owners + row, owner, mask=inside)


@triton.jit(do_not_specialize=["dummy", "rows", "longest", "heads"])
def _accept(
    tokens,
    stride,
    width,
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
    ROOTED: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    DECIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    lane = tl.load(seats + b)
    length = tl.load(lengths + lane)
    start = tl.load(starts + b)
    drafted = start * 0
    if not ROOTED:
        drafted = tl.minimum(tl.load(starts + b + 1) - start - 1, longest)
    step = tl.arange(0, STEPS)
    mine = tokens + lane.to(tl.int64) * stride
    ahead = tl.load(mine + length + step, mask=(step < drafted) & (length + step < width), other=0)
    judged = tl.load(targets + start + step, mask=(step <= drafted) & (start + step < rows), other=0)
    right = ahead == judged
    if SYNTHETIC:  # a coin of 24 random bits
        right = (mix(tl.load(seed + lane), length + step, _ACCEPT) >> 40).to(tl.int32) < heads
    accepted = tl.min(tl.where((step < drafted) & right, STEPS, step), axis=0)  # the first wrong step, or `drafted`
    bonus = tl.sum(tl.where(step == accepted, judged, 0), axis=0)
    if DECIDED:
        verdict = tl.load(verdicts + 2 * b)
        if verdict >= 0:
            accepted = verdict
            bonus = tl.load(verdicts + 2 * b + 1)
    new = tl.where(step < accepted, ahead, tl.where(step == accepted, bonus, 0))
    real = lane != dummy
    row = out + b * (2 * longest + 4)
    tl.store(row, tl.where(real, accepted, 0))
    tl.store(row + 1, tl.where(real, drafted, 0))
    tl.store(row + 2 + step, tl.where(real, new, 0), mask=step <= longest)
    tl.store(row + 3 + longest + step, tl.where(real, ahead, 0), mask=step < longest)
    tl.store(row + 3 + 2 * longest, tl.where(real, length + accepted + 1, 0))
    if real:
        tl.store(mine + length + accepted, bonus, mask=length + accepted < width)
        tl.store(lengths + lane, length + accepted + 1)


@triton.jit(do_not_specialize=["offset", "seat_count"])
def _push(
    lane_tokens,
    stride,
    width,
    lengths,
    seats,
    tokens,
    offset,
    seat_count,
    SEATS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.arange(0, SEATS)
    real = seat < seat_count
    lane = tl.load(seats + seat, mask=real, other=0)
    at = tl.load(lengths + lane, mask=real, other=0) + offset
    token = tl.load(tokens + seat, mask=real, other=0)
    tl.store(lane_tokens + lane.to(tl.int64) * stride + at, token, mask=real & (at < width))
