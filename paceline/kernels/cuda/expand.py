"""Matrices of groups or 8-bit floats as floats: the numbers that products use, computed once and not in every product.

They take two to four times the memory. Where a device has room they are kept: in place of groups, whose products are
slow, and beside 8-bit floats, which few rows read in half the time. Elsewhere they are made for a product of so many
rows that reading them is not what takes time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.formats import FLOAT, FLOAT8, GROUPED, NIBBLES, CudaMatrix, stored
from paceline.kernels.quant import FLOATS_SHARE, Weight, values_of

OUTPUTS = 32  # outputs of a program; it computes 64 inputs of each


def has_room(weights: Mapping[str, Weight], device: torch.device) -> bool:
    """Tell whether all weights would take at most FLOATS_SHARE of the device's memory in 16 bits."""
    if device.type != "cuda":
        return False
    floats = 2 * sum(values_of(weight).numel() for weight in weights.values())
    return floats <= FLOATS_SHARE * torch.cuda.get_device_properties(device).total_memory


def expanded(matrix: CudaMatrix, *, dtype: torch.dtype) -> CudaMatrix:
    """Return a matrix of a grouped format as floats, in memory of its own, and one of 8-bit floats with floats beside
    them; one of another format stays as it is."""
    if matrix.format not in (GROUPED, NIBBLES, FLOAT8):
        return matrix
    floats = expand(matrix, torch.empty((matrix.outputs, matrix.inputs), dtype=dtype, device=matrix.q.device))
    return replace(matrix, floats=floats) if matrix.format == FLOAT8 else floats


def expand(matrix: CudaMatrix, out: Tensor) -> CudaMatrix:
    """Fill out [outputs, inputs] with the numbers of a matrix of groups or 8-bit floats; return a matrix of these."""
    assert matrix.scale is not None
    grid = (triton.cdiv(matrix.outputs, OUTPUTS), triton.cdiv(matrix.inputs, 64))
    _expand[grid](
        matrix.q,
        matrix.scale,
        out,
        matrix.outputs,
        matrix.inputs,
        OUTPUTS=OUTPUTS,
        FORMAT=matrix.format,
        num_warps=4,
    )
    return replace(matrix, q=out, format=FLOAT, scale=None)


@triton.jit
def _expand(q, scale, out, outputs, inputs, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr):
    n = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * 64 + tl.arange(0, 64)[None, :]
    known = (n < outputs) & (k < inputs)
    value = stored(q, n, k, known, inputs, FORMAT)
    if FORMAT == 4:  # FLOAT8
        value *= tl.load(scale + n, mask=n < outputs, other=0.0)
    else:
        pair = scale + 2 * (k // 32 * outputs + n)
        step = tl.load(pair, mask=known, other=0.0).to(tl.float32)
        value = value * step + tl.load(pair + 1, mask=known, other=0.0).to(tl.float32)
    tl.store(out + n * inputs + k, value.to(out.dtype.element_ty), mask=known)
