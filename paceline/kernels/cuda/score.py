"""Score tokens on a CUDA device: log-probability, rank and the best alternatives; `score_reference` defines it.

    _partials   (chunk of the vocabulary, token)   largest logit, sum of exponentials, larger ones, maxima of parts
    _finish     (token)                            join the chunks, and find the best tokens

The best k tokens are in the k parts with the largest maxima. So `_finish` reads only these parts of a row. Chunks are
joined in one order, so that a row has the same bits in every round.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # tokens per program of `_partials`
PART = 128  # tokens of a part
TOP_EACH = 4  # alternatives per warp of `_finish`: with more, the parts do not fit its registers

_CHUNK, _PART = tl.constexpr(CHUNK), tl.constexpr(PART)
_LOWEST = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))


def score(
    logits: Tensor,
    *,
    rows: Tensor,
    tokens: Tensor,
    out: Tensor,
    raw: Tensor | None = None,
    edits: Tensor | None = None,
    lanes: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Score `tokens` int32 [n] by `rows` of logits, into the report `out` int32 [n, 2 + 2 * top]."""
    count, vocab, top = len(rows), logits.shape[1], out.shape[1] // 2 - 1
    assert out.is_contiguous(), "the rows of `out` must be adjacent"
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    assert (raw is None) == (edits is None) == (lanes is None), "edited rows are found by their lanes"
    chunks, parts = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, PART)
    scratch = _scratch(logits.device, triton.next_power_of_2(count), chunks, parts)
    source = (
        logits,
        logits.stride(0),
        vocab,
        logits if raw is None else raw,
        0 if raw is None else raw.stride(0),
        rows if edits is None else edits,
        rows if lanes is None else lanes,
        rows,
        tokens,
    )
    options = {"RAW": raw is not None, "PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}
    _partials[(chunks, count)](*source, *scratch, parts, num_warps=8, **options)
    _finish[(count,)](
        *source,
        *scratch,
        parts,
        out,
        top,
        CHUNKS=triton.next_power_of_2(chunks),
        PARTS=triton.next_power_of_2(parts),
        TOP=triton.next_power_of_2(top) if top else 0,
        num_warps=min(max(triton.next_power_of_2(max(top, 1)) // TOP_EACH, 4), 32),
        **options,
    )


def score_pairs(
    outcomes: Tensor,
    *,
    lanes: Tensor,
    scored: Tensor,
    row_starts: Tensor,
    rows: Tensor,
    tokens: Tensor,
    tree: bool = False,
    pdl: bool = False,
) -> None:
    """List the row and the token of each new token of a round; see `score_reference`."""
    steps = rows.shape[1]
    _pairs[(len(rows),)](
        outcomes,
        outcomes.stride(0),
        lanes,
        scored,
        row_starts,
        rows,
        tokens,
        steps,
        STEPS=triton.next_power_of_2(steps),
        TREE=tree,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


class _Scratch(NamedTuple):
    best: Tensor  # float32 [n, chunks] largest logit of each chunk
    sums: Tensor  # float32 [n, chunks] sum of exponentials, relative to it
    larger: Tensor  # int32 [n, chunks] logits larger than the token's
    maxima: Tensor  # float32 [n, parts] largest logit of each part


@cache
def _scratch(device: torch.device, count: int, chunks: int, parts: int) -> _Scratch:
    return _Scratch(
        best=torch.zeros((count, chunks), device=device),
        sums=torch.zeros((count, chunks), device=device),
        larger=torch.zeros((count, chunks), dtype=torch.int32, device=device),
        maxima=torch.zeros((count, parts), device=device),
    )


# ── kernels ──


@triton.jit
def _partials(
    logits,
    stride,
    vocab,
    raw,
    raw_stride,
    edits,
    lanes,
    rows,
    tokens,
    best,
    sums,
    larger,
    maxima,
    parts,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    row = tl.load(rows + pair).to(tl.int64)
    if row >= 0:
        wanted = tl.load(tokens + pair)
        part = tl.arange(0, _CHUNK // _PART)
        token = chunk * _CHUNK + part[:, None] * _PART + tl.arange(0, _PART)[None, :]
        value = _read(logits, stride, vocab, raw, raw_stride, edits, lanes, row, token, RAW)
        chosen = _read(logits, stride, vocab, raw, raw_stride, edits, lanes, row, wanted, RAW)
        tops = tl.max(value, axis=1)
        top = tl.max(tops, axis=0)
        base = tl.where(top == _LOWEST, 0.0, top)
        total = tl.sum(tl.sum(tl.exp(value - base), axis=1), axis=0)
        above = tl.sum(tl.sum((value > chosen).to(tl.int32), axis=1), axis=0)
        tl.store(best + pair * chunks + chunk, top)
        tl.store(sums + pair * chunks + chunk, total)
        tl.store(larger + pair * chunks + chunk, above)
        at = chunk * (_CHUNK // _PART) + part
        tl.store(maxima + pair * parts + at, tops, mask=at < parts)


@triton.jit(do_not_specialize=["top"])
def _finish(
    logits,
    stride,
    vocab,
    raw,
    raw_stride,
    edits,
    lanes,
    rows,
    tokens,
    best,
    sums,
    larger,
    maxima,
    parts,
    out,
    top,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + pair).to(tl.int64)
    if row >= 0:
        chunk, chunks = tl.arange(0, CHUNKS), tl.cdiv(vocab, _CHUNK)
        inside = chunk < chunks
        peaks = tl.load(best + pair * chunks + chunk, mask=inside, other=_LOWEST)
        totals = tl.load(sums + pair * chunks + chunk, mask=inside, other=0.0)
        peak = tl.max(peaks, axis=0)
        log_total = tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))
        wanted = tl.load(tokens + pair)
        chosen = _read(logits, stride, vocab, raw, raw_stride, edits, lanes, row, wanted, RAW)
        rank = tl.sum(tl.load(larger + pair * chunks + chunk, mask=inside, other=0), axis=0)
        report = out + pair * (2 + 2 * top)
        tl.store(report, _bits(chosen - peak - log_total))
        tl.store(report + 1, rank)
        if TOP > 0:
            part, place = tl.arange(0, PARTS), tl.arange(0, TOP)
            maximum = tl.load(maxima + pair * parts + part, mask=part < parts, other=_LOWEST)
            keys = tl.where(part < parts, _key(maximum, part), _NO_KEY)
            chosen_parts = tl.zeros((TOP,), tl.int32)
            for i in range(tl.minimum(top, parts)):
                first = tl.max(keys, axis=0)
                chosen_parts = tl.where(place == i, _index(first), chosen_parts)
                keys = tl.where(keys == first, _NO_KEY, keys)
            token = chosen_parts[:, None] * _PART + tl.arange(0, _PART)[None, :]
            listed = (place[:, None] < tl.minimum(top, parts)) & (token < vocab)
            value = _read(logits, stride, vocab, raw, raw_stride, edits, lanes, row, token, RAW)
            left = tl.where(listed, _key(value, token), _NO_KEY)
            for i in range(top):
                first = tl.max(tl.max(left, axis=1), axis=0)
                tl.store(report + 2 + i, _index(first))
                tl.store(report + 2 + top + i, _bits(_value(first) - peak - log_total))
                left = tl.where(left == first, _NO_KEY, left)


@triton.jit(do_not_specialize=["stride", "steps"])
def _pairs(
    outcomes,
    stride,
    lanes,
    scored,
    row_starts,
    rows,
    tokens,
    steps,
    STEPS: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    wanted = tl.load(scored + tl.load(lanes + seat)) != 0
    step = tl.arange(0, STEPS)
    new = (step <= tl.load(outcomes + seat * stride)) & wanted
    token = tl.load(outcomes + seat * stride + 2 + step, mask=new, other=0)
    order = step
    if TREE:
        order = 1 + tl.load(outcomes + seat * stride + 2 * steps + 1 + step, mask=new & (step > 0), other=-1)
    row = tl.where(new, tl.load(row_starts + seat) + order, -1)
    tl.store(rows + seat * steps + step, row, mask=step < steps)
    tl.store(tokens + seat * steps + step, token, mask=step < steps)


@triton.jit
def _read(logits, stride, vocab, raw, raw_stride, edits, lanes, row, token, RAW: tl.constexpr):
    """Read raw logits of a row as float32; NaN counts as -inf, and -0 as 0."""
    inside = token < vocab
    if RAW:
        if tl.load(edits + tl.load(lanes + row)) != 0:
            value = tl.load(raw + row * raw_stride + token, mask=inside, other=_LOWEST)
        else:
            value = tl.load(logits + row * stride + token, mask=inside, other=_LOWEST)
    else:
        value = tl.load(logits + row * stride + token, mask=inside, other=_LOWEST)
    value = value + 0.0
    return tl.where(value == value, value, _LOWEST)


@triton.jit
def _key(value, index):
    """Join a logit and an index to an int64 that orders by the logit, and of equal ones the lower index first."""
    bits = value.to(tl.int32, bitcast=True)
    image = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (image << 32) + (index ^ 0x7FFFFFFF)


@triton.jit
def _index(key):
    return ((key & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    image = (key >> 32).to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)
