"""Kernels around the layer of an EAGLE-3 head: its input from two sources, and its output for the last rows alone.

    pair     tokens ── embedding ── norm ─┐
             states ─────────────── norm ─┴─ [rows, 2 · hidden]; the states, or their norm, begin the residual stream
    norm_at  the rows that draw ─── norm ─── [seats, hidden]

One program computes one row, in float32, and rounds where `kernels.reference` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.norm import embedding, launch_options, warps_of


def pair(
    tokens: Tensor,
    table: CudaMatrix,
    embed_norm: Tensor,
    states: Tensor,
    state_norm: Tensor,
    paired: Tensor,
    x: Tensor,
    *,
    eps: float,
    norm_first: bool,
    ends: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fill paired [rows, 2 · hidden] and x [rows, hidden] from tokens [rows] and states [any, hidden].

    Row b continues from states[ends[b + 1] - 1] with `ends` int32 [rows + 1], otherwise from states[b]."""
    rows, hidden = x.shape
    width = triton.next_power_of_2(hidden)
    _pair[(rows,)](
        tokens,
        table.q,
        x if table.scale is None else table.scale,
        embed_norm,
        states,
        state_norm,
        paired,
        x,
        tokens if ends is None else ends,
        table.outputs,
        hidden,
        eps,
        WIDTH=width,
        FORMAT=table.format,
        NORM_FIRST=norm_first,
        ENDS=ends is not None,
        PDL=pdl,
        num_warps=warps_of(width),
        **launch_options(pdl),
    )


def norm_at(x: Tensor, ends: Tensor | None, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False) -> None:
    """Compute out [seats, hidden] = rms_norm of row ends[b + 1] - 1 of x · weight; of row b without `ends`."""
    seats, hidden = out.shape
    width = triton.next_power_of_2(hidden)
    _norm_at[(seats,)](
        x,
        weight if ends is None else ends,
        weight,
        out,
        hidden,
        eps,
        WIDTH=width,
        ENDS=ends is not None,
        PDL=pdl,
        num_warps=warps_of(width),
        **launch_options(pdl),
    )


@triton.jit
def _pair(
    tokens,
    table,
    scales,
    embed_norm,
    states,
    state_norm,
    paired,
    x,
    ends,
    vocab,
    hidden,
    eps,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    k = tl.arange(0, WIDTH)
    known = k < hidden
    first = tl.load(embed_norm + k, mask=known, other=0.0)
    second = tl.load(state_norm + k, mask=known, other=0.0)
    if PDL:  # in this order: kernels of a pass may rely on all work before it, see `attend`
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    source = _source(ends, row, ENDS)
    state = tl.load(states + source * hidden + k, mask=known, other=0.0)
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), vocab - 1).to(tl.int64)
    embedded = embedding(table, scales, token, k, known, hidden, vocab, FORMAT)
    embedded = embedded.to(x.dtype.element_ty).to(tl.float32)
    left = embedded * tl.rsqrt(tl.sum(embedded * embedded) / hidden + eps) * first
    wide = state.to(tl.float32)
    right = (wide * tl.rsqrt(tl.sum(wide * wide) / hidden + eps) * second).to(x.dtype.element_ty)
    at = row * 2 * hidden + k
    tl.store(paired + at, left.to(x.dtype.element_ty), mask=known)
    tl.store(paired + at + hidden, right, mask=known)
    tl.store(x + row * hidden + k, right if NORM_FIRST else state, mask=known)


@triton.jit
def _norm_at(x, ends, weight, out, hidden, eps, WIDTH: tl.constexpr, ENDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, WIDTH)
    known = k < hidden
    w = tl.load(weight + k, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wide = tl.load(x + _source(ends, row, ENDS) * hidden + k, mask=known, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    tl.store(out + row * hidden + k, (wide * w).to(out.dtype.element_ty), mask=known)


@triton.jit
def _source(ends, row, ENDS: tl.constexpr):
    """Return the row of the last pass that a seat continues from; a seat without rows gets any."""
    if ENDS:
        row = tl.maximum(tl.load(ends + row + 1) - 1, 0).to(tl.int64)
    return row
