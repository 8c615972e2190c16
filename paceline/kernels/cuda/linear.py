"""Products of a few rows with a large matrix, near the speed at which the matrix can be read from memory.

Every element of a product is the sum, in order, of `parts` sums over consecutive ranges of K; the tensor cores
accumulate each in float32 in steps of 16. On Hopper this fixes the bits: they are equal for every tile shape, for both
kinds of matrix instruction, and for cuBLAS unless it divides K itself. So tiles may depend on the number of rows, while
a row's result never depends on the other rows. `parts` depends on the matrix alone.

    out[r, n] = epilogue( Σ_k x[r, k] · w[n, k] + bias[n] )        epilogue: nothing, + residual, or act(gate) · up

The weight is the first factor (tile [outputs, k] times [k, rows]), since tensor cores accept few rows only as the
second factor. Beyond 64 rows cuBLAS, "the library", is faster (docs/experiments.md, "The library's products beyond 64
rows"). It is used if it gives the same bits, which is checked with random numbers for each matrix shape and number of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.cuda.compiling import only_compiling
from paceline.kernels.cuda.formats import FLOAT, CudaMatrix
from paceline.kernels.cuda.tiles import FEW_ROWS, OUTPUTS, UNIT, Tiles

# Inputs of each output whose weights are prefetched before the rows are ready; more slow down the previous kernel
# (H200, docs/experiments.md, "How much of the weights to fetch ahead").
AHEAD = 256
SILU, GELU = 1, 2  # activations


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


class Products:
    """Launches products, and holds the scratch memory of matrices with several parts."""

    def __init__(self, matrices: Iterable[CudaMatrix], *, device: torch.device | str, pdl: bool) -> None:
        """`matrices` are all that it will multiply with; they fix the size of the scratch memory."""
        self.pdl = pdl
        size = max((matrix.parts * matrix.outputs for matrix in matrices if matrix.parts > 1), default=1)
        self.partial = torch.empty(FEW_ROWS * size, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)  # 0 between launches
        self._descriptors: dict[tuple[int, ...], Any] = {}
        self._agrees: dict[tuple[object, ...], bool] = {}  # by shape: whether the library gives the same bits
        self._scratch: dict[int, Tensor] = {}

    def __call__(
        self,
        x: Tensor,  # [rows, inputs]
        matrix: CudaMatrix,
        out: Tensor,  # [rows, outputs]
        *,
        residual: Tensor | None = None,  # [rows, outputs]; may be `out` itself
        activation: int = 0,
        tiles: Tiles | None = None,
    ) -> None:
        """Compute out = x · matrix. With an `activation` the matrix is gate above up; out is activation(gate) · up."""
        dtype = self._library_dtype(matrix, x, out, residual=residual, activation=activation)
        if tiles is None and len(x) > FEW_ROWS and self._library_agrees(x, matrix, dtype):
            self._by_library(x, matrix, out, dtype, residual=residual, activation=activation)
        else:
            self._by_tiles(x, matrix, out, residual=residual, activation=activation, tiles=tiles)

    def sums(self, x: Tensor, matrix: CudaMatrix) -> Tensor | None:
        """Compute the parts of a product, float32 [parts, rows, outputs], by the library, for `finish_norm` or
        `finish`; None: the library is not used."""
        if len(x) <= FEW_ROWS or not self._library_agrees(x, matrix, torch.float32):
            return None
        return self._library_sums(x, matrix, torch.float32)

    @staticmethod
    def _library_dtype(
        matrix: CudaMatrix, x: Tensor, out: Tensor, *, residual: Tensor | None, activation: int
    ) -> torch.dtype:
        """Choose the library's result type: float32 for sums to be finished, x's for a gate, else that of `out`."""
        if matrix.parts > 1 or matrix.bias is not None or residual is not None:
            return torch.float32
        return x.dtype if activation else out.dtype

    def _library_agrees(self, x: Tensor, matrix: CudaMatrix, dtype: torch.dtype) -> bool:
        """Whether the library gives the same bits; its algorithm depends on the number of rows and the result type."""
        if matrix.format != FLOAT or not matrix.q.is_cuda:
            return False
        key = (len(x), matrix.outputs, matrix.inputs, matrix.parts, dtype)
        if key not in self._agrees:
            if torch.cuda.is_current_stream_capturing():
                return False
            generator = torch.Generator(x.device).manual_seed(len(x))
            random = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
            bare = replace(matrix, bias=None)
            mine, other = (torch.empty((len(x), matrix.outputs), dtype=dtype, device=x.device) for _ in range(2))
            self._by_tiles(random, bare, mine)
            self._by_library(random, bare, other, dtype)
            if only_compiling():
                return True
            self._agrees[key] = torch.equal(mine, other)
        return self._agrees[key]

    def _by_library(
        self,
        x: Tensor,
        matrix: CudaMatrix,
        out: Tensor,
        dtype: torch.dtype,
        *,
        residual: Tensor | None = None,
        activation: int = 0,
    ) -> None:
        if matrix.parts == 1 and matrix.bias is None and residual is None and not activation:
            torch.mm(x, matrix.q.T, out_dtype=dtype, out=out)
        else:
            sums = self._library_sums(x, matrix, dtype)
            finish(sums, matrix.bias, residual, out, activation=activation, pdl=self.pdl)

    def _library_sums(self, x: Tensor, matrix: CudaMatrix, dtype: torch.dtype) -> Tensor:
        rows, outputs = len(x), matrix.outputs
        sums = self._temporary((matrix.parts, rows, outputs), dtype)
        share = triton.cdiv(matrix.inputs, matrix.parts * UNIT) * UNIT
        if matrix.inputs % share or matrix.parts == 1:
            for part, (left, right) in enumerate(zip(x.split(share, 1), matrix.q.split(share, 1), strict=True)):
                torch.mm(left, right.T, out_dtype=sums.dtype, out=sums[part])
        else:
            left = x.view(rows, matrix.parts, -1).transpose(0, 1)  # [parts, rows, inputs of a part]
            right = matrix.q.view(outputs, matrix.parts, -1).permute(1, 2, 0)
            torch.bmm(left, right, out_dtype=sums.dtype, out=sums)
        return sums

    def _temporary(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return scratch memory with a fixed address, shared by products of the same size up to a power of two."""
        bytes = math.prod(shape) * dtype.itemsize
        size = 1 << (bytes - 1).bit_length()
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8, device=self.partial.device)
        return self._scratch[size][:bytes].view(dtype).view(shape)

    def _by_tiles(
        self,
        x: Tensor,
        matrix: CudaMatrix,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        activation: int = 0,
        tiles: Tiles | None = None,
    ) -> None:
        rows, inputs = x.shape
        gated = activation != 0
        outputs = matrix.outputs // 2 if gated else matrix.outputs
        tiles = tiles or Tiles.of(
            rows,
            gated=gated,
            programs=triton.cdiv(outputs, OUTPUTS) * matrix.parts,
            format=matrix.format,
            size=x.element_size(),
        )
        spread = matrix.parts > 1 and rows <= FEW_ROWS  # True: each part has programs of its own
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
            EVEN=inputs % UNIT == 0 and outputs % tiles.outputs == 0,
            ACTIVATION=activation,
            RESIDUAL=residual is not None,
            BIAS=matrix.bias is not None,
            FORMAT=matrix.format,
            DESCRIPTORS=tiles.descriptors,
            STAGES=tiles.stages,
            AHEAD=_power_below(min(AHEAD, inputs // matrix.parts)) if self.pdl and rows <= FEW_ROWS else 0,
            PDL=self.pdl,
            num_warps=tiles.warps,
            **({"launch_pdl": True} if self.pdl else {}),
        )

    def _descriptor(self, tensor: Tensor, rows: int, columns: int) -> Any:
        key = (tensor.data_ptr(), len(tensor), tensor.shape[1], rows, columns)
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor.from_tensor(tensor, [rows, columns])
        return self._descriptors[key]


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
    outputs = width // 2 if activation else width
    _finish[(rows, triton.cdiv(outputs, 1024))](
        sums,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        rows * width,
        outputs,
        PARTS=parts,
        BLOCK=1024,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit
def _weights(
    pointer, scale, minimum, n, k, inputs, known, FORMAT: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """Load a tile [n, k] of the weights as `dtype`; elements that are not `known` are 0."""
    q = tl.load(pointer + n[:, None] * inputs + k[None, :], mask=known, other=0)
    if FORMAT == 2:  # GROUPED
        at = n[:, None] * (inputs // GROUP) + k[None, :] // GROUP
        return _scaled(q, scale + at, minimum + at, known, dtype)
    if FORMAT == 4:  # FLOAT8
        q = q.to(tl.float8e4nv, bitcast=True)
    return q.to(dtype)


@triton.jit
def _nibbles(
    pointer, scale, minimum, n, j, inputs, known, HIGH: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """Load half of a tile of 4-bit weights. Byte j of a row has input i = j // 32 · 64 + j % 32 in its low half, and
    input i + 32 in its high half."""
    q = tl.load(pointer + n[:, None] * (inputs // 2) + j[None, :], mask=known, other=0)
    q = (q >> 4) if HIGH else (q & 15)
    at = n[:, None] * (inputs // GROUP) + (j[None, :] // GROUP * 2 + HIGH)
    return _scaled(q, scale + at, minimum + at, known, dtype)


@triton.jit
def _scaled(q, scale, minimum, known, dtype: tl.constexpr):
    step = tl.load(scale, mask=known, other=0.0).to(tl.float32)
    return (q.to(tl.float32) * step + tl.load(minimum, mask=known, other=0.0).to(tl.float32)).to(dtype)


@triton.jit
def _gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute activation(gate) · up; gate and up are first rounded to the activations' type."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == 1:
        return gate * tl.sigmoid(gate) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner) * up  # (1 + tanh(a)) / 2 is sigmoid(2a)


@triton.jit
def _finish(
    sums,
    bias,
    residual,
    out,
    size,  # elements of a part: rows × outputs
    outputs,
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
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = n < outputs
    width = 2 * outputs if ACTIVATION > 0 else outputs
    at = row * width + n
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * size + at, mask=known, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + n, mask=known, other=0.0)
    if ACTIVATION > 0:
        up = tl.load(sums + at + outputs, mask=known, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias + outputs + n, mask=known, other=0.0)
        total = _gated(total, up, out.dtype.element_ty, ACTIVATION)
    at = row * outputs + n
    if RESIDUAL:
        total += tl.load(residual + at, mask=known, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)


@triton.jit
def _fetch(pointer, rows, first, inputs, known, AHEAD: tl.constexpr):
    """Prefetch AHEAD inputs of these rows of the weights [rows, inputs], 2 bytes each, into the second-level cache."""
    lines = tl.arange(0, AHEAD // 64)
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
    AHEAD: tl.constexpr,
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
    if AHEAD >= 64 and FORMAT == 0:
        _fetch(w_memory, n, tl.program_id(1) * share, inputs, known_n, AHEAD)
        if ACTIVATION > 0:
            _fetch(w_memory, n + outputs, tl.program_id(1) * share, inputs, known_n, AHEAD)
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
        if ACTIVATION > 0:
            total = _gated(total, total_up, out.dtype.element_ty, ACTIVATION)
        if RESIDUAL:
            total += tl.load(residual + at, mask=known, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
