"""Products of many rows: programs that stay on their multiprocessor and take one block [rows, outputs] after another.

Blocks are loaded by tensor descriptors (TMA), and taken in an order in which neighbours share rows or outputs, so that
the second-level cache serves most loads. A gate is applied before the block is stored. Parts are added in registers, so
that they take no memory. The bits are those of `linear`. `finish` ends a product that the library has computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.cuda.tiles import PROCESSORS, UNIT

GROUP = 16  # blocks of rows that are taken together
FINISHED = 2048  # sums per program of `finish`


@dataclass(frozen=True, slots=True)
class Block:
    """The shape of a program's work."""

    rows: int
    outputs: int
    inputs: int  # inputs of a step along K
    stages: int  # stages of the pipeline of loads
    warps: int


# Each is the fastest for some matrix and number of rows (H200, docs/experiments.md, "Own blocks beyond 64 rows").
BLOCKS = (
    Block(rows=64, outputs=256, inputs=64, stages=4, warps=4),
    Block(rows=128, outputs=128, inputs=64, stages=5, warps=4),
    Block(rows=128, outputs=256, inputs=64, stages=3, warps=8),
)


class Descriptors:
    """Makes tensor descriptors, once for each tensor and shape of a block."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Any] = {}

    def __call__(self, tensor: Tensor, rows: int, columns: int) -> Any:
        key = (tensor.data_ptr(), *tensor.shape, rows, columns)
        if key not in self._made:
            self._made[key] = TensorDescriptor.from_tensor(tensor, [rows, columns])
        return self._made[key]


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    parts: int,
    block: Block,
    activation: int,
    descriptors: Descriptors,
    pdl: bool,
) -> None:
    """Compute a product as `Products` defines it; x, weight and out have the same type and rows of 16-byte units."""
    rows, outputs = len(x), len(weight)
    blocks = triton.cdiv(rows, block.rows) * triton.cdiv(outputs, block.outputs)
    _many[(min(blocks, PROCESSORS),)](
        descriptors(x, block.rows, block.inputs),
        descriptors(weight, block.outputs, block.inputs),
        descriptors(out, block.rows, block.outputs // 2 if activation else block.outputs),
        out if residual is None else residual,
        out if bias is None else bias,
        rows,
        outputs,
        x.shape[1],
        triton.cdiv(x.shape[1], parts * UNIT) * UNIT,
        PARTS=parts,
        BLOCK_R=block.rows,
        BLOCK_N=block.outputs,
        BLOCK_K=block.inputs,
        GROUP=GROUP,
        ACTIVATION=activation,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        STAGES=block.stages,
        PDL=pdl,
        num_warps=block.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def finish(
    sums: Tensor,  # [parts, rows, outputs]
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    activation: int = 0,
    pdl: bool = False,
) -> None:
    """Finish a product: add its parts in order and the bias, then add the residual or apply the gate."""
    parts, rows, width = sums.shape
    _finish[(rows, triton.cdiv(width, FINISHED))](
        sums,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        rows * width,
        width,
        PARTS=parts,
        BLOCK=FINISHED,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit
def gated(sums, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute activation(gate) · up [rows, n] of sums [rows, 2n], gate and up in turns, rounded to `dtype` first."""
    pairs = tl.reshape(sums.to(dtype).to(tl.float32), (sums.shape[0], sums.shape[1] // 2, 2))
    gate, up = tl.split(pairs)
    if ACTIVATION == 1:
        return gate * tl.sigmoid(gate) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner) * up  # (1 + tanh(a)) / 2 is sigmoid(2a)


@triton.jit
def added(sums, residual, dtype: tl.constexpr):
    """Add a residual to a product that is rounded to `dtype` first, as the library does."""
    return sums.to(dtype).to(tl.float32) + residual.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _many(
    x,  # descriptors of [rows, inputs], [outputs, inputs] and [rows, outputs]
    w,
    out,
    residual,
    bias,
    rows,
    outputs,
    inputs,
    share,  # inputs of a part
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    high, wide = tl.cdiv(rows, BLOCK_R), tl.cdiv(outputs, BLOCK_N)
    FLAT: tl.constexpr = PARTS == 1 and not RESIDUAL  # loads of the next block begin early, and take more memory
    for block in tl.range(tl.program_id(0), high * wide, tl.num_programs(0), flatten=FLAT):
        first = block // (GROUP * wide) * GROUP
        taken = tl.minimum(high - first, GROUP)
        inside = block % (GROUP * wide)
        r0 = (first + inside % taken) * BLOCK_R
        n0 = inside // taken * BLOCK_N
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if PARTS == 1:
            for k0 in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
                acc = tl.dot(x.load([r0, k0]), w.load([n0, k0]).T, acc, input_precision="ieee")
        else:
            for part in tl.range(PARTS):
                one = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
                for k0 in tl.range(part * share, tl.minimum(part * share + share, inputs), BLOCK_K, num_stages=STAGES):
                    one = tl.dot(x.load([r0, k0]), w.load([n0, k0]).T, one, input_precision="ieee")
                acc += one
        n = n0 + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
        if ACTIVATION > 0:
            out.store([r0, n0 // 2], gated(acc, out.dtype, ACTIVATION).to(out.dtype))
        else:
            if RESIDUAL:
                r = r0 + tl.arange(0, BLOCK_R)
                known = (r < rows)[:, None] & (n < outputs)[None, :]
                at = r.to(tl.int64)[:, None] * outputs + n[None, :]
                acc = added(acc, tl.load(residual + at, mask=known, other=0.0), out.dtype)
            out.store([r0, n0], acc.to(out.dtype))


@triton.jit
def _finish(
    sums,
    bias,
    residual,
    out,
    size,  # elements of a part: rows × width
    width,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * size + row * width + n, mask=n < width, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + n, mask=n < width, other=0.0)
    if ACTIVATION > 0:
        total = gated(total, out.dtype.element_ty, ACTIVATION)
        width = width // 2
        n = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    at = row * width + n
    if RESIDUAL:
        total = added(total, tl.load(residual + at, mask=n < width, other=0.0), out.dtype.element_ty)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=n < width)
