"""Drafts from known texts on a CUDA device, found by a search without an index; `lookup_reference` defines them.

    _search      (chunk of a text, seat)   find the best match that ends in the chunk
    _copy        (seat)                    take the best chunk, and copy the tokens after it behind the committed ones
    _copy_sure   (seat)                    report the best chunk, and copy over a draft if the match is long enough

A match is one integer, so that the best is the largest: size * 2**24 + end in the sequence's own text, and in the
prediction size * 2**24 + 2**24 - 2 - 2 * distance from the expected place, + 1 if it is later.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.lookup_reference import DRAFTED, FAR_MATCH_TOKENS, NEAR_TOKENS, SIZE_SHIFT, SURE_TOKENS
from paceline.kernels.round_reference import DeviceLanes
from paceline.kernels.tree_reference import TreeLanes

CHUNK = 1024  # positions per program of `_search`
COPY = 32  # tokens that `_copy` copies at once

_CHUNK, _COPY = tl.constexpr(CHUNK), tl.constexpr(COPY)
_SIZE_SHIFT, _PLACE = tl.constexpr(SIZE_SHIFT), tl.constexpr((1 << SIZE_SHIFT) - 1)
_NEAR, _FAR_MATCH, _SURE = tl.constexpr(NEAR_TOKENS), tl.constexpr(FAR_MATCH_TOKENS), tl.constexpr(SURE_TOKENS)
_DRAFTED = tl.constexpr(DRAFTED)


def lookup(
    state: DeviceLanes,
    *,
    seats: Tensor,
    limits: Tensor,
    min_ngram: int,
    max_ngram: int,
    found: Tensor,
    predicted: bool = False,
    pdl: bool = False,
) -> None:
    """Write drafts of at most `limits` [seats] tokens behind the committed ones; `found` [seats] gets their lengths.

    `predicted`: look in the predictions of the lanes, too, and update `state.drift`."""
    width = state.tokens.shape[1]
    assert width < 1 << (SIZE_SHIFT - 2), f"{width} tokens a lane do not fit a key"
    chunks = triton.cdiv(width, CHUNK)
    texts = 2 if predicted else 1
    keys = _keys(seats.device, triton.next_power_of_2(len(seats)), texts * chunks)
    own = (state.tokens, state.tokens.stride(0), width, state.lengths, seats, keys, chunks)
    lanes = (*own, state.predicted, state.predicted.stride(0), state.predicted_lengths, state.drift)
    options = {"PREDICTED": predicted, "PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    _search[(texts * chunks, len(seats))](*lanes, MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, **options)
    _copy[(len(seats),)](*lanes, limits, found, CHUNKS=triton.next_power_of_2(chunks), **options)


def copy_sure(
    state: TreeLanes,
    *,
    seats: Tensor,
    limits: Tensor,
    sure: Tensor,
    min_ngram: int,
    max_ngram: int,
    found: Tensor,
    matches: Tensor,
    ahead: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Let a copy, at most `limits` [seats] tokens, take the place of a seat's draft where its text repeats surely; see
    `lookup_reference`."""
    width, nodes = state.tokens.shape[1], state.parents.shape[1]
    assert width < 1 << (SIZE_SHIFT - 2), f"{width} tokens a lane do not fit a key"
    assert max_ngram << SIZE_SHIFT < DRAFTED, f"a match of {max_ngram} tokens does not fit a report"
    chunks = triton.cdiv(width, CHUNK)
    keys = _keys(seats.device, triton.next_power_of_2(len(seats)), chunks)
    own = (state.tokens, state.tokens.stride(0), width, state.lengths, seats, keys, chunks)
    unused = (state.predicted, state.predicted.stride(0), state.predicted_lengths, state.drift)
    options = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    _search[(chunks, len(seats))](*own, *unused, MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, PREDICTED=False, **options)
    _copy_sure[(len(seats),)](
        *own,
        state.dummy,
        limits,
        sure,
        found,
        matches,
        found if ahead is None else ahead,
        state.parents,
        state.parents.stride(0),
        nodes,
        CHUNKS=triton.next_power_of_2(chunks),
        NODES=triton.next_power_of_2(max(1, nodes)),
        AHEAD=ahead is not None,
        **options,
    )


@cache  # never freed: captured graphs keep the address
def _keys(device: torch.device, seats: int, chunks: int) -> Tensor:
    return torch.zeros((seats, chunks), dtype=torch.int32, device=device)


@triton.jit
def _search(
    tokens,
    stride,
    width,
    lengths,
    seats,
    keys,
    chunks,
    predicted,
    predicted_stride,
    predicted_lengths,
    drift,
    MIN_NGRAM: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    PREDICTED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, seat = tl.program_id(0), tl.program_id(1)
    lane = tl.load(seats + seat)
    length = tl.load(lengths + lane)
    mine = tokens + lane.to(tl.int64) * stride
    key = length * 0
    if chunk < chunks:
        if chunk * _CHUNK < length:
            end = chunk * _CHUNK + tl.arange(0, _CHUNK)  # the n-gram is tokens[end - size : end]
            size = _matched(mine, length, mine, length, end, MAX_NGRAM)
            key = tl.max(tl.where(size >= MIN_NGRAM, (size << _SIZE_SHIFT) + end, 0), axis=0)
    elif PREDICTED:
        stop = tl.load(predicted_lengths + lane)
        if (chunk - chunks) * _CHUNK < stop:
            expected = length + tl.load(drift + lane)
            place = (chunk - chunks) * _CHUNK + tl.arange(0, _CHUNK)
            size = _matched(predicted + lane.to(tl.int64) * predicted_stride, stop, mine, length, place, MAX_NGRAM)
            distance = tl.abs(place - expected)
            enough = (size >= _FAR_MATCH) | ((size > 0) & (distance <= _NEAR))
            nearness = _PLACE - 1 - 2 * distance + (place > expected).to(tl.int32)
            key = tl.max(tl.where(enough, (size << _SIZE_SHIFT) + nearness, 0), axis=0)
    tl.store(keys + seat * tl.num_programs(0) + chunk, key)


@triton.jit
def _matched(text, stop, mine, length, end, MAX_NGRAM: tl.constexpr):
    """Count the last of `length` tokens of `mine` that stand before each `end` in a text of `stop` tokens."""
    alive = (end >= 1) & (end < stop)
    size = tl.zeros(end.shape, tl.int32)
    back = 1
    while (back <= MAX_NGRAM) & (tl.max(alive.to(tl.int32), axis=0) > 0):
        alive = alive & (end >= back) & (back <= length)
        wanted = tl.load(mine + length - back, mask=back <= length, other=0)
        alive = alive & (tl.load(text + end - back, mask=alive, other=0) == wanted)
        size += alive.to(tl.int32)
        back += 1
    return size


@triton.jit
def _copy(
    tokens,
    stride,
    width,
    lengths,
    seats,
    keys,
    chunks,
    predicted,
    predicted_stride,
    predicted_lengths,
    drift,
    limits,
    found,
    CHUNKS: tl.constexpr,
    PREDICTED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    first = keys + seat * chunks * (2 if PREDICTED else 1)
    key = tl.max(tl.load(first + chunk, mask=chunk < chunks, other=0), axis=0)
    lane = tl.load(seats + seat)
    length = tl.load(lengths + lane)
    mine = tokens + lane.to(tl.int64) * stride
    source = key & _PLACE  # a copy that passes the last token starts again at `source`
    period = length - source
    room = tl.where(key > 0, width - length, 0)
    if PREDICTED:
        best = tl.max(tl.load(first + chunks + chunk, mask=chunk < chunks, other=0), axis=0)
        later = best & 1
        distance = (_PLACE - 1 + later - (best & _PLACE)) // 2
        place = length + tl.load(drift + lane) + tl.where(later == 1, distance, -distance)
        tl.store(drift + lane, place - length, mask=(best >> _SIZE_SHIFT) >= _SURE)
        follows = (best > 0) & ((best >> _SIZE_SHIFT) >= (key >> _SIZE_SHIFT))
        room = tl.where(follows, tl.minimum(tl.load(predicted_lengths + lane) - place, width - length), room)
        known = predicted + lane.to(tl.int64) * predicted_stride + place
    count = tl.maximum(tl.minimum(tl.load(limits + seat), room), 0)
    tl.store(found + seat, count)
    for start in range(0, count, _COPY):
        step = start + tl.arange(0, _COPY)
        inside = step < count
        if PREDICTED:
            token = tl.load(mine + source + step % period, mask=inside & (not follows), other=0)
            token += tl.load(known + step, mask=inside & follows, other=0)
        else:
            token = tl.load(mine + source + step % period, mask=inside, other=0)
        tl.store(mine + length + step, token, mask=inside)


@triton.jit(do_not_specialize=["dummy"])
def _copy_sure(
    tokens,
    stride,
    width,
    lengths,
    seats,
    keys,
    chunks,
    dummy,
    limits,
    sure,
    found,
    matches,
    ahead,
    parents,
    parents_stride,
    nodes,
    CHUNKS: tl.constexpr,
    NODES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    key = tl.max(tl.load(keys + seat * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
    lane = tl.load(seats + seat)
    key = tl.where(lane == dummy, 0, key)
    length = tl.load(lengths + lane)
    drafted, least = tl.load(found + seat), tl.load(sure + seat)
    room = tl.maximum(tl.minimum(tl.load(limits + seat), width - length), 0)
    copies = (least > 0) & ((key >> _SIZE_SHIFT) >= least) & (room > 0)
    count = tl.where(copies, room, 0)
    tl.store(matches + seat, key + tl.where(drafted > 0, _DRAFTED, 0))
    tl.store(found + seat, tl.where(copies, count, drafted))
    if AHEAD:
        tl.store(ahead + seat, tl.where(copies, dummy, lane))
    mine = tokens + lane.to(tl.int64) * stride
    source = key & _PLACE  # a copy that passes the last token starts again at `source`
    for start in range(0, count, _COPY):
        step = start + tl.arange(0, _COPY)
        inside = step < count
        token = tl.load(mine + source + step % (length - source), mask=inside, other=0)
        tl.store(mine + length + step, token, mask=inside)
    node = tl.arange(0, NODES)
    tl.store(parents + lane.to(tl.int64) * parents_stride + node, node - 1, mask=copies & (node < nodes))
