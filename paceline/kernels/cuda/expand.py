"""Matrices of a grouped format as floats, for products of so many rows that reading them is not what takes time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.formats import NIBBLES, CudaMatrix

OUTPUTS = 32  # outputs of a program; it computes 64 inputs of each


def expand(matrix: CudaMatrix, out: Tensor) -> None:
    """Set out [outputs, inputs] to the numbers that `_linear` multiplies with."""
    assert matrix.scale is not None
    grid = (triton.cdiv(matrix.outputs, OUTPUTS), triton.cdiv(matrix.inputs, 64))
    _expand[grid](
        matrix.q,
        matrix.scale,
        out,
        matrix.outputs,
        matrix.inputs,
        OUTPUTS=OUTPUTS,
        NIBBLES=matrix.format == NIBBLES,
        num_warps=4,
    )


@triton.jit
def _expand(q, scale, out, outputs, inputs, OUTPUTS: tl.constexpr, NIBBLES: tl.constexpr):
    n = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * 64 + tl.arange(0, 64)[None, :]
    known = (n < outputs) & (k < inputs)
    if NIBBLES:
        packed = tl.load(q + n * (inputs // 2) + k // 64 * 32 + k % 32, mask=known, other=0)
        value = tl.where(k % 64 < 32, packed & 15, packed >> 4)
    else:
        value = tl.load(q + n * inputs + k, mask=known, other=0)
    pair = scale + 2 * (k // 32 * outputs + n)
    step = tl.load(pair, mask=known, other=0.0).to(tl.float32)
    low = tl.load(pair + 1, mask=known, other=0.0).to(tl.float32)
    tl.store(out + n * inputs + k, (value.to(tl.float32) * step + low).to(out.dtype.element_ty), mask=known)
