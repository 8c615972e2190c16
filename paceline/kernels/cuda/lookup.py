"""N-gram drafts on a CUDA device: the drafts of drafters/ngram.py, found by a search of the history without an index.

    _search   (chunk of the history, seat)   find the longest n-gram that ends in the chunk; of equal ones the latest
    _copy     (seat)                         take the best chunk, and copy the tokens after it behind the committed ones

A match is one integer, size * 2**24 + end, so that the best match is the largest.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.round_reference import SIZE_SHIFT, DeviceLanes

CHUNK = 1024  # positions per program of `_search`
COPY = 32  # tokens that `_copy` copies at once

_CHUNK, _COPY = tl.constexpr(CHUNK), tl.constexpr(COPY)
_SIZE_SHIFT, _PLACE = tl.constexpr(SIZE_SHIFT), tl.constexpr((1 << SIZE_SHIFT) - 1)


def lookup(
    state: DeviceLanes,
    *,
    seats: Tensor,
    limits: Tensor,
    min_ngram: int,
    max_ngram: int,
    found: Tensor,
    pdl: bool = False,
) -> None:
    """Write drafts of at most `limits` [seats] tokens behind the committed ones; `found` [seats] gets their lengths."""
    width = state.tokens.shape[1]
    assert width < 1 << SIZE_SHIFT, f"{width} tokens a lane do not fit a key"
    chunks = triton.cdiv(width, CHUNK)
    keys = _keys(seats.device, triton.next_power_of_2(len(seats)), chunks)
    lanes = (state.tokens, state.tokens.stride(0), width, state.lengths, seats, keys)
    options = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    _search[(chunks, len(seats))](*lanes, MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, **options)
    _copy[(len(seats),)](*lanes, limits, found, chunks, CHUNKS=triton.next_power_of_2(chunks), **options)


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
    MIN_NGRAM: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, seat = tl.program_id(0), tl.program_id(1)
    lane = tl.load(seats + seat)
    length = tl.load(lengths + lane)
    key = length * 0
    if chunk * _CHUNK < length:
        mine = tokens + lane.to(tl.int64) * stride
        end = chunk * _CHUNK + tl.arange(0, _CHUNK)  # the n-gram is tokens[end - size : end]
        alive = (end >= 1) & (end < length)
        size = tl.zeros((_CHUNK,), tl.int32)
        back = 1
        while (back <= MAX_NGRAM) & (tl.max(alive.to(tl.int32), axis=0) > 0):
            alive = alive & (end >= back)  # end < length, so that the suffix has `back` tokens, too
            wanted = tl.load(mine + length - back, mask=back <= length, other=0)
            alive = alive & (tl.load(mine + end - back, mask=alive, other=0) == wanted)
            size += alive.to(tl.int32)
            back += 1
        key = tl.max(tl.where(size >= MIN_NGRAM, (size << _SIZE_SHIFT) + end, 0), axis=0)
    tl.store(keys + seat * tl.num_programs(0) + chunk, key)


@triton.jit
def _copy(
    tokens,
    stride,
    width,
    lengths,
    seats,
    keys,
    limits,
    found,
    chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    key = tl.max(tl.load(keys + seat * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
    lane = tl.load(seats + seat)
    length = tl.load(lengths + lane)
    count = tl.maximum(tl.minimum(tl.load(limits + seat), width - length), 0)
    count = tl.where(key > 0, count, 0)
    tl.store(found + seat, count)
    mine = tokens + lane.to(tl.int64) * stride
    source = key & _PLACE  # a copy that passes the last token starts again at `source`
    for start in range(0, count, _COPY):
        step = start + tl.arange(0, _COPY)
        inside = step < count
        token = tl.load(mine + source + step % (length - source), mask=inside, other=0)
        tl.store(mine + length + step, token, mask=inside)
