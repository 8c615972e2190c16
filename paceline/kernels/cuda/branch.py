"""`branch` of trees on a CUDA device: find the best tokens after each row of a level; `growth_reference` defines it.

It is a program for each row and chunk of the vocabulary, which finds the best tokens of its chunk. `grow` merges them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.noise import keys_of, rough_gumbel
from paceline.kernels.growth_reference import Growth
from paceline.kernels.tree_reference import TreeLanes
from paceline.sampling.sampler import Stream

CHUNK = 4096  # tokens per program of `_branch`
_CHUNK = tl.constexpr(CHUNK)
_TOKEN = tl.constexpr(int(Stream.TOKEN))
_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any column
_LOWEST = tl.constexpr(float("-inf"))

Scratch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def branch(
    logits: Tensor,
    state: TreeLanes,
    growth: Growth,
    *,
    seats: Tensor,
    level: int,
    ids: Tensor | None = None,
    fitted: bool = True,
    pdl: bool = False,
) -> None:
    """Find the best tokens after the rows of a level, logits [seats · rows each, vocab]; see `growth_reference`.

    They stay in scratch memory, chunk by chunk, until `grow` merges them."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    chunks, tops = triton.cdiv(vocab, CHUNK), max(2, growth.width)
    scratch = scratch_of(logits.device, len(growth.row_tokens), chunks, tops)
    _branch[(chunks, rows)](
        logits,
        logits.stride(0),
        vocab,
        seats if ids is None else ids,  # a placeholder is never read
        seats,
        rows // len(seats),
        level,
        state.lengths,
        state.inverse_temperature,
        state.seed,
        *scratch,
        TOPS=tops,
        IDS=ids is not None,
        FITTED=fitted,
        FAST=logits.is_cuda,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )


@cache
def scratch_of(device: torch.device, rows: int, chunks: int, tops: int) -> Scratch:
    """Return scores, logits and tokens of the best columns [rows, chunks, tops]; peaks and totals [rows, chunks]."""
    best = [torch.zeros((rows, chunks, tops), device=device) for _ in range(2)]
    tokens = torch.zeros((rows, chunks, tops), dtype=torch.int32, device=device)
    sums = [torch.zeros((rows, chunks), device=device) for _ in range(2)]
    return best[0], best[1], tokens, sums[0], sums[1]


@triton.jit(do_not_specialize=["each", "level"])
def _branch(
    logits,
    stride,
    vocab,
    ids,
    seats,
    each,
    level,
    lengths,
    inverse_temperature,
    seed,
    scores,
    raws,
    tokens,
    peaks,
    totals,
    TOPS: tl.constexpr,
    IDS: tl.constexpr,
    FITTED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.load(seats + row // each)
    scale = tl.load(inverse_temperature + lane)
    column = chunk * _CHUNK + tl.arange(0, _CHUNK)
    inside = column < vocab
    value = tl.load(logits + row * stride + column, mask=inside, other=_LOWEST).to(tl.float32)
    value = tl.where(value == value, value, _LOWEST)
    name = column
    if IDS:
        name = tl.load(ids + column, mask=inside, other=0)
    score = value
    if scale > 0:
        high, low = keys_of(seed, lane, tl.load(lengths + lane) + level, _TOKEN)
        score = tl.where(inside, value * scale + rough_gumbel(name, high, low, FAST), _LOWEST)
    summed = value if FITTED else score
    peak = tl.max(summed, axis=0)
    safe = tl.where(peak == _LOWEST, 0.0, peak)
    cell = row * tl.num_programs(0) + chunk
    tl.store(peaks + cell, peak)
    tl.store(totals + cell, tl.sum(tl.exp(summed - safe), axis=0))
    for rank in tl.static_range(TOPS):
        best = tl.max(score, axis=0)
        at = tl.min(tl.where(inside & (score == best), column, _NONE), axis=0)
        tl.store(scores + cell * TOPS + rank, best)
        tl.store(raws + cell * TOPS + rank, tl.sum(tl.where(column == at, summed, 0.0), axis=0))
        tl.store(tokens + cell * TOPS + rank, tl.sum(tl.where(column == at, name, 0), axis=0))
        inside = inside & (column != at)
        score = tl.where(column == at, _LOWEST, score)
