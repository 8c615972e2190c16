"""Draw tokens from logits on a CUDA device, with the noise of kernels/noise.py; `round_reference.draw` defines it.

There are three kernels; rows without filters leave the second at once:

    _score    (chunk of the vocabulary, row)   find the chunk's best token; with filters also the largest logits
    _gather   (chunks of the vocabulary, row)  with filters: list the logits that may stay, in any order
    _settle   (row)                            choose the best token of all chunks, or the best above the filters' floor

`filters` finds the floor, in the list, which is nearly always enough, or else in the whole row. Floating-point
operations are never fused, because the noise must have the same bits on every machine.

A head draws in a vocabulary of its own: its columns stand for the tokens `ids`, whose noise they get. Its confidence in
a token is computed along the way, and `_settle` ends doubtful drafts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.filters import (
    PART,
    best_of,
    bounds_of,
    clean,
    floor_of,
    is_filtered,
    mass_from,
    mass_of,
    named,
    share_of,
)
from paceline.kernels.cuda.noise import ROUGHLY, draw_keys, gumbel, rough_gumbel
from paceline.kernels.round_reference import BEST, DRAWN, DeviceLanes, Doubt

CHUNK = 4096  # tokens per program of `_score` and `_gather`
REGISTERS = 64  # of a thread of `_score`: four programs share a multiprocessor, since each waits long for its logits
CAPACITY = 4096  # logits in the list of a row
GATHERERS = 256  # programs of `_gather` at most: rows without filters need none, and even their launch takes time

_CHUNK, _PART, _CAPACITY = (tl.constexpr(value) for value in (CHUNK, PART, CAPACITY))
_ROUGHLY = tl.constexpr(ROUGHLY)
_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any token
_LOWEST = tl.constexpr(float("-inf"))
_DRAWN0, _DRAWN1, _BEST0, _BEST1 = (tl.constexpr(value) for value in (*DRAWN, *BEST))


def draw(
    logits: Tensor,
    state: DeviceLanes,
    *,
    lanes: Tensor,
    out: Tensor,
    positions: Tensor | None = None,
    offset: int = 0,
    push: bool = False,
    ids: Tensor | None = None,
    doubt: Doubt | None = None,
    free: Tensor | None = None,
    floors: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Draw one token for each row: `out` int32 [rows] from logits [rows, vocab] of the sequences in `lanes` [rows].

    A token's position is `positions[row] + offset`; without `positions` it is the lane's length + `offset`. With `push`
    it is also written to this position. `ids` int32 [vocab] are the tokens of the columns, None: 0, 1, …; of equal
    scores the first column wins. `doubt` is updated. Rows that are not 0 in `free` int32 [rows] are drawn with the
    noise of a drafter. `floors` float32 [rows] gets the smallest scaled logit that the filters of each row leave, -inf
    if it has none.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    chunks = triton.cdiv(vocab, CHUNK)
    scratch = _scratch(logits.device, triton.next_power_of_2(rows), vocab)
    lists = _lists(logits.device, triton.next_power_of_2(rows))
    names = lanes if ids is None else ids  # a placeholder is never read
    row = (logits, logits.stride(0), vocab, names, lanes, lanes if positions is None else positions, offset)
    keys = (state.seed, lanes if free is None else free)
    asked = (state.lengths, state.inverse_temperature, state.top_k, state.top_p, state.min_p, *keys)
    kept = (*scratch, *lists)
    kinds = {"FREE": free is not None, "IDS": ids is not None, "DOUBT": doubt is not None}
    options = {**kinds, "PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}
    placed = {"PLACED": positions is not None}
    parts = {"PARTS": triton.next_power_of_2(triton.cdiv(vocab, PART))}
    _score[(chunks, rows)](
        *row, *asked, *kept, FAST=logits.is_cuda, num_warps=8, maxnreg=REGISTERS, **placed, **options
    )
    each = triton.cdiv(chunks * rows, GATHERERS)  # chunks of a program
    _gather[(triton.cdiv(chunks, each), rows)](*row, *asked, *kept, each, num_warps=8, **parts, **options)
    ahead = (out, state.tokens, state.tokens.stride(0), state.tokens.shape[1], out if floors is None else floors)
    doubts = tuple(doubt or Doubt(scratch.scores, scratch.scores, out, out, 0))
    shape = {"CHUNKS": triton.next_power_of_2(chunks), "PUSH": push, "FLOORS": floors is not None, **placed, **parts}
    _settle[(rows,)](*row, *asked, *kept, *ahead, *doubts, num_warps=8, **shape, **options)


class _Scratch(NamedTuple):
    scores: Tensor  # float32 [rows, chunks] best score of each chunk
    tokens: Tensor  # int32 [rows, chunks] its token
    peaks: Tensor  # float32 [rows, chunks] largest logit of each chunk, at temperature 1
    totals: Tensor  # float32 [rows, chunks] sum of exponentials of its logits, relative to the largest
    maxima: Tensor  # float32 [rows, parts] largest logit of each part


class _Lists(NamedTuple):
    counts: Tensor  # int32 [rows] logits that belong in the list; may exceed CAPACITY
    masses: Tensor  # int64 [rows] mass of all logits that min-p leaves, for rows with top-p but no top-k
    values: Tensor  # float32 [rows, CAPACITY]
    tokens: Tensor  # int32 [rows, CAPACITY]


@cache  # never freed: captured graphs keep the addresses
def _scratch(device: torch.device, rows: int, vocab: int) -> _Scratch:
    chunks, parts = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, PART)
    return _Scratch(
        scores=torch.zeros((rows, chunks), device=device),
        tokens=torch.zeros((rows, chunks), dtype=torch.int32, device=device),
        peaks=torch.zeros((rows, chunks), device=device),
        totals=torch.zeros((rows, chunks), device=device),
        maxima=torch.zeros((rows, parts), device=device),
    )


@cache
def _lists(device: torch.device, rows: int) -> _Lists:
    return _Lists(
        counts=torch.zeros(rows, dtype=torch.int32, device=device),
        masses=torch.zeros(rows, dtype=torch.int64, device=device),
        values=torch.zeros((rows, CAPACITY), device=device),
        tokens=torch.zeros((rows, CAPACITY), dtype=torch.int32, device=device),
    )


# ── kernels ──


@triton.jit(do_not_specialize=["offset"])
def _score(
    logits,
    stride,
    vocab,
    ids,
    lanes,
    positions,
    offset,
    lengths,
    inverse_temperature,
    top_k,
    top_p,
    min_p,
    seed,
    free,
    scores,
    tokens,
    peaks,
    totals,
    maxima,
    counts,
    masses,
    list_values,
    list_tokens,
    PLACED: tl.constexpr,
    FAST: tl.constexpr,
    FREE: tl.constexpr,
    IDS: tl.constexpr,
    DOUBT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, _CHUNK // _PART)
    token = chunk * _CHUNK + part[:, None] * _PART + tl.arange(0, _PART)[None, :]
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=_LOWEST)  # first: it takes longest
    lane = tl.load(lanes + row)
    scale = tl.load(inverse_temperature + lane)
    filtered = is_filtered(scale, tl.load(top_k + lane), tl.load(top_p + lane), tl.load(min_p + lane), vocab)
    value = clean(value)
    chunks = tl.num_programs(0)
    if DOUBT:
        peak = tl.max(tl.max(value, axis=1), axis=0)
        safe = tl.where(peak == _LOWEST, 0.0, peak)
        tl.store(peaks + row * chunks + chunk, peak)
        tl.store(totals + row * chunks + chunk, tl.sum(tl.sum(tl.exp(value - safe), axis=1), axis=0))
    if scale > 0:
        value = value * scale
    if (scale > 0) & (not filtered):
        position = _position(positions, lengths, row, lane, offset, PLACED)
        high, low = draw_keys(seed, lengths, free, lane, row, position, FREE)
        name = named(ids, token, token < vocab, IDS)
        best, first = _top_with_noise(value, token, name, high, low, FAST)
    else:
        largest, place = tl.max(value, axis=1, return_indices=True)
        best = tl.max(largest, axis=0)
        first = tl.min(tl.where(largest == best, chunk * _CHUNK + part * _PART + place, _NONE), axis=0)
        parts = tl.cdiv(vocab, _PART)
        at = chunk * (_CHUNK // _PART) + part
        tl.store(maxima + row * parts + at, largest, mask=at < parts)
    tl.store(scores + row * chunks + chunk, best)
    tl.store(tokens + row * chunks + chunk, first)
    if chunk == 0:  # `_gather` adds to these
        tl.store(counts + row, 0)
        tl.store(masses + row, 0)


@triton.jit(do_not_specialize=["offset", "each"])
def _gather(
    logits,
    stride,
    vocab,
    ids,
    lanes,
    positions,
    offset,
    lengths,
    inverse_temperature,
    top_k,
    top_p,
    min_p,
    seed,
    free,
    scores,
    tokens,
    peaks,
    totals,
    maxima,
    counts,
    masses,
    list_values,
    list_tokens,
    each,  # chunks of a program
    PARTS: tl.constexpr,
    FREE: tl.constexpr,
    IDS: tl.constexpr,
    DOUBT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, row = tl.program_id(0) * each, tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + row)
    scale = tl.load(inverse_temperature + lane)
    k, p, least = tl.load(top_k + lane), tl.load(top_p + lane), tl.load(min_p + lane)
    if is_filtered(scale, k, p, least, vocab):
        best, floor, bound = bounds_of(maxima + row * tl.cdiv(vocab, _PART), vocab, k, p, least, PARTS)
        for chunk in range(first, tl.minimum(first + each, tl.cdiv(vocab, _CHUNK))):
            token = chunk * _CHUNK + tl.arange(0, _CHUNK)
            value = clean(tl.load(logits + row * stride + token, mask=token < vocab, other=_LOWEST)) * scale
            inside = (token < vocab) & (value >= bound)
            wanted = inside.to(tl.int32)
            count = tl.sum(wanted, axis=0)
            if count > 0:
                at = tl.atomic_add(counts + row, count) + tl.cumsum(wanted, axis=0) - 1
                inside = inside & (at < _CAPACITY)
                tl.store(list_values + row * _CAPACITY + at, value, mask=inside)
                tl.store(list_tokens + row * _CAPACITY + at, token, mask=inside)
            if (p < 1) & ((k <= 0) | (k >= vocab)):
                mass = tl.where((token < vocab) & (value >= floor), mass_of(value - best), 0)
                tl.atomic_add(masses + row, tl.sum(mass, axis=0))


@triton.jit(do_not_specialize=["offset", "turn"])
def _settle(
    logits,
    stride,
    vocab,
    ids,
    lanes,
    positions,
    offset,
    lengths,
    inverse_temperature,
    top_k,
    top_p,
    min_p,
    seed,
    free,
    scores,
    tokens,
    peaks,
    totals,
    maxima,
    counts,
    masses,
    list_values,
    list_tokens,
    out,
    ahead,
    ahead_stride,
    width,
    floors,
    confidence,
    thresholds,
    limits,
    found,
    turn,
    CHUNKS: tl.constexpr,
    PUSH: tl.constexpr,
    FLOORS: tl.constexpr,
    PLACED: tl.constexpr,
    PARTS: tl.constexpr,
    FREE: tl.constexpr,
    IDS: tl.constexpr,
    DOUBT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    position = _position(positions, lengths, row, lane, offset, PLACED)
    chunk, chunks = tl.arange(0, CHUNKS), tl.cdiv(vocab, _CHUNK)
    score = tl.load(scores + row * chunks + chunk, mask=chunk < chunks, other=_LOWEST)
    token = tl.load(tokens + row * chunks + chunk, mask=chunk < chunks, other=_NONE)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), token, _NONE), axis=0)
    if FLOORS:
        tl.store(floors + row, _LOWEST)
    scale = tl.load(inverse_temperature + lane)
    k, p, least = tl.load(top_k + lane), tl.load(top_p + lane), tl.load(min_p + lane)
    if is_filtered(scale, k, p, least, vocab):
        k = tl.where(k < vocab, k, 0)
        best, floor, bound = bounds_of(maxima + row * tl.cdiv(vocab, _PART), vocab, k, p, least, PARTS)
        high, low = draw_keys(seed, lengths, free, lane, row, position, FREE)
        listed, mass = tl.load(counts + row), tl.load(masses + row)
        values, names = list_values + row * _CAPACITY, list_tokens + row * _CAPACITY
        enough = listed <= _CAPACITY
        if enough & (k <= 0) & (p < 1):  # top-p alone may need more logits than the list has
            enough = mass_from(values, listed, 1.0, best, bound, 1024, True) >= share_of(p, mass)
        if enough:
            floor = floor_of(values, listed, 1.0, best, bound, k, p, mass, 1024, True)
            chosen = best_of(values, names, ids, listed, 1.0, floor, high, low, 1024, True, IDS)
        else:
            source = logits + row * stride
            floor = floor_of(source, vocab, scale, best, floor, k, p, mass, 4096, False)
            chosen = best_of(source, names, ids, vocab, scale, floor, high, low, 4096, False, IDS)
        if FLOORS:
            tl.store(floors + row, floor)
    if DOUBT:
        peak = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=_LOWEST)
        total = tl.load(totals + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        highest = tl.max(peak, axis=0)
        total = tl.sum(total * tl.exp(peak - highest), axis=0)
        logit = clean(tl.load(logits + row * stride + chosen, mask=chosen < vocab, other=_LOWEST))
        probability = tl.exp(logit - highest) / total
        right = _BEST0 * probability / (1.0 + _BEST1 * probability)
        if tl.load(inverse_temperature + lane) > 0:
            right = _DRAWN0 + _DRAWN1 * tl.sqrt(probability)
        sure = tl.load(confidence + row)
        going = (sure >= 0) & (sure >= tl.load(thresholds + row)) & (turn < tl.load(limits + row))
        tl.store(confidence + row, sure * right, mask=going)
        tl.store(found + row, turn + 1, mask=going)
    chosen = named(ids, chosen, chosen < vocab, IDS)
    tl.store(out + row, chosen)
    if PUSH:
        tl.store(ahead + lane.to(tl.int64) * ahead_stride + position, chosen, mask=position < width)


@triton.jit
def _top(value, token):
    """Find the largest value of a tile, and the lowest token that has it."""
    best = tl.max(tl.max(value, axis=1), axis=0)
    return best, tl.min(tl.min(tl.where(value == best, token, _NONE), axis=1), axis=0)


@triton.jit
def _top_with_noise(value, token, name, high, low, FAST: tl.constexpr):
    """Find the top of value + noise. Exact noise is slow: it is computed for all only if rough noise leaves several."""
    rough = value + rough_gumbel(name, high, low, FAST)
    best = tl.max(tl.max(rough, axis=1), axis=0)
    near = rough >= best - (_ROUGHLY + tl.abs(best) * 1e-6)  # the second term covers the rounding of sums
    if tl.sum(tl.sum(near.to(tl.int32), axis=1), axis=0) == 1:
        first = tl.min(tl.min(tl.where(near, token, _NONE), axis=1), axis=0)
        first_name = tl.min(tl.min(tl.where(near, name, _NONE), axis=1), axis=0)
        best = tl.sum(tl.sum(tl.where(near, value, 0.0), axis=1), axis=0) + gumbel(first_name, high, low)
    else:
        best, first = _top(value + gumbel(name, high, low), token)
    return best, first


@triton.jit
def _position(positions, lengths, row, lane, offset, PLACED: tl.constexpr):
    return tl.load(positions + row if PLACED else lengths + lane) + offset


# ── kernels: floors ──
