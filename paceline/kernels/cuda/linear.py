"""Products of a few rows with a large matrix, near the speed at which the matrix can be read.

Every element of a product is the sum, in order, of `parts` sums over consecutive ranges of K, each accumulated in
float32 in steps of 16 by the tensor cores. On Hopper this fixes the bits: they are the same for every tile shape, for
both kinds of matrix instruction, and for cuBLAS wherever that does not divide K itself. So tiles may follow the number
of rows, and a row's result never depends on which rows ride along. `parts` depends on the matrix alone.

    out[r, n] = epilogue( Σ_k x[r, k] · w[n, k] + bias[n] )        epilogue: nothing, + residual, or act(gate) · up

The weight stands first in the product (tile [outputs, k] times [k, rows]), since the tensor cores take few rows only
on that side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.cuda.formats import FLOAT, GROUPED, Matrix

FEW_ROWS = 64  # up to here the matrix is read at memory speed
UNIT = 256  # parts of K are multiples of it
ENOUGH_TILES = 96  # tiles of 64 outputs that keep the device busy
SILU, GELU = 1, 2


def parts_of(outputs: int, inputs: int, *, gated: bool) -> int:
    """Into how many ranges K is divided, so that a narrow matrix still has work for every processor."""
    parts = 1
    while not gated and parts < 8 and outputs // 64 * parts < ENOUGH_TILES and inputs // (2 * parts) >= 2 * UNIT:
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class Tiles:
    outputs: int
    rows: int
    inputs: int  # a step along K
    warps: int
    stages: int
    descriptors: bool = False  # read tiles through the tensor copy engine
    prefetch: int = 0  # inputs whose weights are fetched into the cache before the rows are there

    @classmethod
    def of(cls, rows: int, *, gated: bool, outputs: int, format: int) -> Tiles:
        if format != FLOAT:
            return cls(
                outputs=64, rows=_power(rows, 16, 64), inputs=64 if format == GROUPED else 128, warps=4, stages=3
            )
        if rows <= FEW_ROWS:
            wide = gated or outputs > 1 << 14
            tall = rows <= 16 and not wide
            return cls(
                outputs=64,
                rows=_power(rows, 16, 64),
                inputs=256 if tall else 128,
                warps=4,
                stages=3 if tall else 4,
                prefetch=512,
            )
        return cls(outputs=128, rows=128, inputs=64, warps=8, stages=4, descriptors=True)


def _power(rows: int, low: int, high: int) -> int:
    return min(max(triton.next_power_of_2(rows), low), high)


class Products:
    """Launches products, with the scratch memory that matrices divided along K need."""

    def __init__(self, matrices: Iterable[Matrix], *, device: torch.device | str, pdl: bool) -> None:
        """`matrices`: those it will meet."""
        self.pdl = pdl
        size = max((matrix.parts * matrix.outputs for matrix in matrices if matrix.parts > 1), default=1)
        self.partial = torch.empty(FEW_ROWS * size, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def __call__(
        self,
        x: Tensor,  # [rows, inputs]
        matrix: Matrix,
        out: Tensor,  # [rows, outputs]
        *,
        residual: Tensor | None = None,  # [rows, outputs]; may be `out` itself
        activation: int = 0,
        tiles: Tiles | None = None,
    ) -> None:
        """`activation`: the matrix is gate above up, and out = activation(gate) · up has half its rows."""
        rows, inputs = x.shape
        gated = activation != 0
        outputs = matrix.outputs // 2 if gated else matrix.outputs
        tiles = tiles or Tiles.of(rows, gated=gated, outputs=outputs, format=matrix.format)
        spread = matrix.parts > 1 and rows <= FEW_ROWS  # parts by different programs
        grid = (triton.cdiv(outputs, tiles.outputs) * triton.cdiv(rows, tiles.rows), matrix.parts if spread else 1)
        weight, source = matrix.q, x
        if tiles.descriptors:
            weight = self._descriptor(matrix.q, tiles.outputs, tiles.inputs)
            source = self._descriptor(x, tiles.rows, tiles.inputs)
        _linear[grid](
            source,
            weight,
            matrix.q,
            out,
            out if residual is None else residual,
            out if matrix.bias is None else matrix.bias,
            out if matrix.scale is None else matrix.scale,
            out if matrix.minimum is None else matrix.minimum,
            self.partial,
            self.counters,
            rows,
            outputs,
            inputs,
            triton.cdiv(inputs, matrix.parts * UNIT) * UNIT,
            x.stride(0),
            BLOCK_N=tiles.outputs,
            BLOCK_R=tiles.rows,
            BLOCK_K=tiles.inputs,
            PARTS=matrix.parts,
            SPREAD=spread,
            EVEN=inputs % (matrix.parts * UNIT) == 0 and outputs % tiles.outputs == 0,
            ACTIVATION=activation,
            RESIDUAL=residual is not None,
            BIAS=matrix.bias is not None,
            FORMAT=matrix.format,
            DESCRIPTORS=tiles.descriptors,
            STAGES=tiles.stages,
            PREFETCH=min(tiles.prefetch, inputs // matrix.parts) // 128 * 128 if self.pdl else 0,
            PDL=self.pdl,
            num_warps=tiles.warps,
            **({"launch_pdl": True} if self.pdl else {}),
        )

    def _descriptor(self, tensor: Tensor, rows: int, columns: int) -> Any:
        key = (tensor.data_ptr(), len(tensor), tensor.shape[1], rows, columns)
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor.from_tensor(tensor, [rows, columns])
        return self._descriptors[key]


@triton.jit
def _weights(
    pointer, scale, minimum, n, k, inputs, known, FORMAT: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """A tile [n, k] of the weights as numbers of `dtype`; rows and columns where `known` is False are 0."""
    q = tl.load(pointer + n[:, None] * inputs + k[None, :], mask=known, other=0)
    if FORMAT == 2:  # GROUPED
        at = n[:, None] * (inputs // GROUP) + k[None, :] // GROUP
        low = tl.load(minimum + at, mask=known, other=0.0)
        return (q.to(tl.float32) * tl.load(scale + at, mask=known, other=0.0) + low).to(dtype)
    if FORMAT == 4:  # FLOAT8
        q = q.to(tl.float8e4nv, bitcast=True)
    return q.to(dtype)


@triton.jit
def _nibbles(
    pointer, scale, minimum, n, j, inputs, known, HIGH: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """Half of a tile of 4-bit weights; byte j of a row holds input j // 32 · 64 + j % 32 below, 32 further above."""
    q = tl.load(pointer + n[:, None] * (inputs // 2) + j[None, :], mask=known, other=0)
    q = (q >> 4) if HIGH else (q & 15)
    at = n[:, None] * (inputs // GROUP) + (j[None, :] // GROUP * 2 + HIGH)
    low = tl.load(minimum + at, mask=known, other=0.0)
    return (q.to(tl.float32) * tl.load(scale + at, mask=known, other=0.0) + low).to(dtype)


@triton.jit
def _fetch(pointer, rows, first, inputs, known, PREFETCH: tl.constexpr):
    """Ask for the beginning of these rows of the weights [rows, inputs] (2 bytes each) in the second cache."""
    lines = tl.arange(0, PREFETCH // 64)
    at = pointer + tl.where(known, rows, 0)[:, None] * inputs + first + lines[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,  # [rows, inputs], or its descriptor
    w,  # [outputs, inputs], or its descriptor
    w_memory,
    out,
    residual,
    bias,
    scale,
    minimum,
    partial,  # float32 [parts, rows, outputs]
    counters,  # int32, all 0 between launches
    rows,
    outputs,
    inputs,
    share,  # inputs of a part
    x_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_blocks = tl.cdiv(rows, BLOCK_R)
    program = tl.program_id(0)
    tile, block = program // row_blocks, program % row_blocks
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    r = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    known_n = n < outputs
    known_r = r < rows
    if PREFETCH > 0 and FORMAT == 0:
        _fetch(w_memory, n, tl.program_id(1) * share, inputs, known_n, PREFETCH)
        if ACTIVATION > 0:
            _fetch(w_memory, n + outputs, tl.program_id(1) * share, inputs, known_n, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    total_up = total
    for turn in range(1 if SPREAD else PARTS):
        first = (tl.program_id(1) if SPREAD else turn) * share
        last = tl.minimum(first + share, inputs)
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        acc_up = acc
        for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if FORMAT == 3:  # NIBBLES
                j = k0 // 2 + tl.arange(0, BLOCK_K // 2)
                known = known_n[:, None] & (j < inputs // 2)[None, :]
                for high in tl.static_range(2):
                    k = j // 32 * 64 + j % 32 + 32 * high
                    xt = tl.load(
                        x + r[None, :] * x_stride + k[:, None], mask=known_r[None, :] & (k < inputs)[:, None], other=0.0
                    )
                    acc = tl.dot(
                        _nibbles(w, scale, minimum, n, j, inputs, known, high, 32, xt.dtype),
                        xt,
                        acc,
                        input_precision="ieee",
                    )
                    if ACTIVATION > 0:
                        acc_up = tl.dot(
                            _nibbles(w, scale, minimum, n + outputs, j, inputs, known, high, 32, xt.dtype),
                            xt,
                            acc_up,
                            input_precision="ieee",
                        )
            elif DESCRIPTORS:
                xt = x.load([block * BLOCK_R, k0])
                acc = tl.dot(w.load([tile * BLOCK_N, k0]), tl.trans(xt), acc)
                if ACTIVATION > 0:
                    acc_up = tl.dot(w.load([outputs + tile * BLOCK_N, k0]), tl.trans(xt), acc_up)
            else:
                k = k0 + tl.arange(0, BLOCK_K)
                if EVEN:
                    xt = tl.load(x + r[:, None] * x_stride + k[None, :], mask=known_r[:, None], other=0.0)
                    known = (n >= 0)[:, None] & (k >= 0)[None, :]
                else:
                    known = known_n[:, None] & (k < last)[None, :]
                    xt = tl.load(
                        x + r[:, None] * x_stride + k[None, :], mask=known_r[:, None] & (k < last)[None, :], other=0.0
                    )
                if EVEN and FORMAT == 0:
                    wt = tl.load(w + n[:, None] * inputs + k[None, :])
                else:
                    wt = _weights(w, scale, minimum, n, k, inputs, known, FORMAT, 32, xt.dtype)
                acc = tl.dot(wt, tl.trans(xt), acc, input_precision="ieee")
                if ACTIVATION > 0:
                    if EVEN and FORMAT == 0:
                        wu = tl.load(w + (n + outputs)[:, None] * inputs + k[None, :])
                    else:
                        wu = _weights(w, scale, minimum, n + outputs, k, inputs, known, FORMAT, 32, xt.dtype)
                    acc_up = tl.dot(wu, tl.trans(xt), acc_up, input_precision="ieee")
        total += acc
        total_up += acc_up
    total, total_up = tl.trans(total), tl.trans(total_up)  # [rows, outputs]
    at = r[:, None] * outputs + n[None, :]
    known = known_r[:, None] & known_n[None, :]
    finishes = True
    if SPREAD:
        size = rows.to(tl.int64) * outputs
        tl.store(partial + tl.program_id(1) * size + at, total, mask=known)
        tl.debug_barrier()
        finishes = tl.atomic_add(counters + program, 1, sem="acq_rel") == PARTS - 1
        if finishes:
            total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for part in tl.static_range(PARTS):
                total += tl.load(partial + part * size + at, mask=known, other=0.0, volatile=True)
            tl.store(counters + program, 0)
    if finishes:
        if FORMAT == 1 or FORMAT == 4:  # CHANNEL, FLOAT8
            total *= tl.load(scale + n, mask=known_n, other=0.0)[None, :]
            if ACTIVATION > 0:
                total_up *= tl.load(scale + outputs + n, mask=known_n, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=known_n, other=0.0)[None, :]
            if ACTIVATION > 0:
                total_up += tl.load(bias + outputs + n, mask=known_n, other=0.0)[None, :]
        if ACTIVATION == 1:
            total = total * tl.sigmoid(total) * total_up
        elif ACTIVATION == 2:
            inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
            total = total * tl.sigmoid(2 * inner) * total_up  # (1 + tanh(a)) / 2 is sigmoid(2a)
        if RESIDUAL:
            total += tl.load(residual + at, mask=known, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
