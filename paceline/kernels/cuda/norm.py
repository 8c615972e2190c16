"""Kernels between products: the embedding, RMS norms, and adding a branch to the residual stream.

One program computes one row, in float32 and rounded once, so that a row never depends on others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.formats import CudaMatrix, stored
from paceline.kernels.cuda.many import added


def embed(tokens: Tensor, table: CudaMatrix, x: Tensor, *, scale: float = 1.0, pdl: bool = False) -> None:
    """Set x [rows, hidden] to rows of the embedding; a token beyond the vocabulary counts as the last one."""
    width = triton.next_power_of_2(table.inputs)
    scale = float(torch.tensor(scale, dtype=x.dtype))  # rounded as in the reference
    _embed[(len(tokens),)](
        tokens,
        table.q,
        x if table.scale is None else table.scale,
        x,
        table.outputs,
        table.inputs,
        scale,
        WIDTH=width,
        FORMAT=table.format,
        SCALED=scale != 1.0,
        PDL=pdl,
        num_warps=warps_of(width),
        **launch_options(pdl),
    )


def norm(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False) -> None:
    """Compute out [rows, hidden] = rms_norm(x) · weight."""
    _norm_rows(x, x, weight, weight, out, eps=eps, branch=False, pdl=pdl)


def add_norm(
    x: Tensor, branch: Tensor, branch_weight: Tensor, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False
) -> None:
    """Compute x += rms_norm(branch) · branch_weight, in place, then out = rms_norm(x) · weight."""
    _norm_rows(x, branch, branch_weight, weight, out, eps=eps, branch=True, pdl=pdl)


def finish_norm(
    sums: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor, out: Tensor, *, eps: float, pdl: bool = False
) -> None:
    """Compute x += sum of the parts `sums` [parts, rows, hidden] + bias, in place, then out = rms_norm(x) · weight."""
    rows, hidden = x.shape
    width = triton.next_power_of_2(hidden)
    _finish_norm[(rows,)](
        sums,
        weight if bias is None else bias,
        x,
        weight,
        out,
        rows * hidden,
        hidden,
        eps,
        WIDTH=width,
        PARTS=len(sums),
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=warps_of(width),
        **launch_options(pdl),
    )


def _norm_rows(
    x: Tensor, added: Tensor, added_weight: Tensor, weight: Tensor, out: Tensor, *, eps: float, branch: bool, pdl: bool
) -> None:
    rows, hidden = x.shape
    width = triton.next_power_of_2(hidden)
    _norm[(rows,)](
        x,
        added,
        added_weight,
        weight,
        out,
        hidden,
        eps,
        WIDTH=width,
        BRANCH=branch,
        PDL=pdl,
        num_warps=warps_of(width),
        **launch_options(pdl),
    )


def warps_of(width: int) -> int:
    return max(1, min(16, width // 512))


def launch_options(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _embed(
    tokens,
    table,
    scales,
    x,
    vocab,
    hidden,
    scale,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # in this order: kernels of a pass may rely on all work before it, see `attend`
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), vocab - 1).to(tl.int64)
    k = tl.arange(0, WIDTH)
    known = k < hidden
    value = embedding(table, scales, token, k, known, hidden, vocab, FORMAT)
    if SCALED:
        value = value.to(x.dtype.element_ty).to(tl.float32) * scale
    tl.store(x + row * hidden + k, value.to(x.dtype.element_ty), mask=known)


@triton.jit
def embedding(table, scales, token, k, known, hidden, vocab, FORMAT: tl.constexpr):
    """Load one row of an embedding of any format as float32."""
    value = stored(table, token, k, known, hidden, FORMAT)
    if FORMAT == 2 or FORMAT == 3:
        group = scales + 2 * (k // 32 * vocab + token)
        low = tl.load(group + 1, mask=known, other=0.0).to(tl.float32)
        value = value * tl.load(group, mask=known, other=0.0).to(tl.float32) + low
    elif FORMAT == 1 or FORMAT == 4:
        value *= tl.load(scales + token)
    return value


@triton.jit
def _norm(
    x, added, added_weight, weight, out, hidden, eps, WIDTH: tl.constexpr, BRANCH: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, WIDTH)
    known = k < hidden
    w = tl.load(weight + k, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * hidden + k
    value = tl.load(x + at, mask=known, other=0.0)
    if BRANCH:
        branch = tl.load(added + at, mask=known, other=0.0).to(tl.float32)
        branch *= tl.rsqrt(tl.sum(branch * branch) / hidden + eps)
        branch *= tl.load(added_weight + k, mask=known, other=0.0)
        value = (value.to(tl.float32) + branch.to(value.dtype).to(tl.float32)).to(value.dtype)
        tl.store(x + at, value, mask=known)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    tl.store(out + at, (wide * w).to(out.dtype.element_ty), mask=known)


@triton.jit
def _finish_norm(
    sums,
    bias,
    x,
    weight,
    out,
    size,  # elements of a part: rows × hidden
    hidden,
    eps,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, WIDTH)
    known = k < hidden
    w = tl.load(weight + k, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * hidden + k
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * size + at, mask=known, other=0.0)
    if BIAS:
        total += tl.load(bias + k, mask=known, other=0.0)
    value = added(total, tl.load(x + at, mask=known, other=0.0), x.dtype.element_ty).to(x.dtype.element_ty)
    tl.store(x + at, value, mask=known)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    tl.store(out + at, (wide * w).to(out.dtype.element_ty), mask=known)
