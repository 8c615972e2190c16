"""Products of rows with a large matrix; of a few rows near the speed at which the matrix can be read from memory.

Every element of a product is the sum, in order, of `parts` sums over consecutive ranges of K; the tensor cores
accumulate each in float32 in steps of 16. On Hopper this fixes the bits: they are equal for every tile shape, for both
kinds of matrix instruction, and for cuBLAS unless it divides K itself. So tiles may depend on the number of rows, while
a row's result never depends on the other rows. `parts` depends on the matrix alone.

    out[r, n] = epilogue( Σ_k x[r, k] · w[n, k] + bias[n] )        epilogue: nothing, + residual, or act(gate) · up

The sum is rounded to the type of `out` before the epilogue. The weight is the first factor (tile [outputs, k] times [k,
rows]), since tensor cores accept few rows only as the second factor. Beyond 64 rows, or 16 if tiles have half the size,
there are several ways: cuBLAS, "the library", which may be told not to divide K, and the blocks of `many`. At the start
the first product of a shape and number of rows tries them on random numbers. Of those with the bits of the tiles it
keeps the library, or from 1,024 rows on the fastest. Later, a number of rows that the start has not met takes blocks,
whose bits do not depend on it. For many rows a matrix of groups or 8-bit floats is expanded to floats once, not tile by
tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.compiling import only_compiling
from paceline.kernels.cuda.expand import expand
from paceline.kernels.cuda.formats import CHANNEL, FLOAT, CudaMatrix
from paceline.kernels.cuda.many import BLOCKS, Block, Descriptors, added, finish, gated, multiply
from paceline.kernels.cuda.tiles import FEW_ROWS, SPREAD_ROWS, UNIT, Tiles, tiled_rows
from paceline.kernels.cuda.ways import KnownWays, Way, compares, seconds_of, whole_sums

# Inputs of each output whose weights are prefetched before the rows are ready; more slow down the previous kernel
# (H200, docs/experiments.md, "How much of the weights to fetch ahead").
AHEAD = 256
SILU, GELU = 1, 2  # activations
ALONE_ROWS = 16  # rows up to which a program that adds all parts of a product is as fast as the norm behind it
UNITS = 8  # elements; rows that blocks load are multiples of 16 bytes
GATED_ROWS = 128  # rows up to which the second of BLOCKS, which applies the gate, is faster than the library
MANY_ROWS = 1024  # rows from which a product takes much longer than its launch, and ways are compared by time
FLOAT8_ROWS = 64  # rows up to which 8-bit floats are faster than bf16, if there are both
EXPANDED_ROWS = 256  # rows from which a matrix of fewer bits is expanded, if that gives the same bits


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _spread(x: Tensor, matrix: CudaMatrix) -> bool:
    """Return True if each part of a product by tiles has programs of its own."""
    return matrix.parts > 1 and len(x) <= SPREAD_ROWS


class Products:
    """Launches products, and holds the scratch memory of matrices with several parts."""

    def __init__(self, matrices: Iterable[CudaMatrix], *, device: torch.device | str, pdl: bool) -> None:
        """`matrices` are all that it will multiply with; they fix the size of the scratch memory."""
        self.pdl = pdl
        size = max((matrix.parts * matrix.outputs for matrix in matrices if matrix.parts > 1), default=1)
        self.partial = torch.empty(SPREAD_ROWS * size, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)  # 0 between launches
        self._ways = KnownWays()
        self._compiled = KnownWays()  # ways that were compiled, before any is chosen
        self._descriptors = Descriptors()
        self._scratch: dict[tuple[str, int], Tensor] = {}  # by use and bytes

    def __call__(
        self,
        x: Tensor,  # [rows, inputs]
        matrix: CudaMatrix,
        out: Tensor,  # [rows, outputs], or [rows, outputs / 2] with an activation
        *,
        residual: Tensor | None = None,  # [rows, outputs]; may be `out` itself
        activation: int = 0,
    ) -> None:
        """Compute out = x · matrix. With an `activation` the matrix is gated, and out is activation(gate) · up."""
        matrix = self._ready(matrix, x)
        way = self._way(x, matrix, out, residual is not None, activation)
        way(x, matrix, out, residual=residual, activation=activation)

    def sums(self, x: Tensor, matrix: CudaMatrix, like: Tensor, *, residual: bool = True) -> Tensor | None:
        """Compute the parts of a product, float32 [parts, rows, outputs], for a kernel that adds them; None: the way to
        compute a product `like` this, which a `residual` may be added to, has no parts or adds them itself."""
        if matrix.parts == 1 and matrix.bias is None:
            return None
        matrix = self._ready(matrix, x)
        way = self._way(x, matrix, like, residual, 0)
        if way in self._libraries:
            with whole_sums() if way == self.by_whole_library else nullcontext():
                return self._library_sums(x, matrix, torch.float32)
        if way == self.by_tiles and len(x) > ALONE_ROWS and _spread(x, matrix) and matrix.format != CHANNEL:
            self.by_tiles(x, matrix, like, finished=False)
            return self.partial[: matrix.parts * like.numel()].view(matrix.parts, *like.shape)
        return None

    def _ready(self, matrix: CudaMatrix, x: Tensor) -> CudaMatrix:
        """Return the matrix, or what it is as floats if there are many rows."""
        if matrix.floats is not None and len(x) > FLOAT8_ROWS:
            return matrix.floats
        if matrix.format in (FLOAT, CHANNEL) or len(x) < EXPANDED_ROWS:
            return matrix
        return expand(matrix, self._temporary((matrix.outputs, matrix.inputs), x.dtype, use="floats"))

    def _way(self, x: Tensor, matrix: CudaMatrix, out: Tensor, residual: bool, activation: int) -> Way:
        tiled = tiled_rows(matrix.outputs, matrix.parts, gated=activation != 0)
        if len(x) <= tiled or matrix.format != FLOAT or not x.is_cuda:
            return self.by_tiles
        kind = (*matrix.q.shape, matrix.parts, matrix.bias is None, residual, activation, out.dtype)
        if known := self._ways.of(kind, len(x)) or (only_compiling() and self._compiled.of(kind, len(x))):
            return known[0]
        near = self._ways.near(kind, len(x))
        if not compares():
            return next((way for way in near if way not in self._libraries), self.by_tiles)
        assert not torch.cuda.is_current_stream_capturing(), "no way is chosen for this product: call it once before"
        kept, self._descriptors = self._descriptors, Descriptors()  # a descriptor keeps its tensor: forget the tries
        ways = self._tried(x, matrix, out, residual, activation, near)
        self._descriptors = kept
        (self._compiled if only_compiling() else self._ways).add(kind, len(x), ways)
        return ways[0]

    def _tried(
        self, x: Tensor, matrix: CudaMatrix, out: Tensor, residual: bool, activation: int, near: Sequence[Way]
    ) -> list[Way]:
        """Try ways on random numbers, and list those with the bits of the tiles, the best first; the library's
        algorithm, and its bits, depend on the number of rows. Times are compared at powers of two, the best ways of
        other numbers of rows are those `near` them."""
        generator = torch.Generator(x.device).manual_seed(len(x))
        source, start = (torch.empty_like(like).normal_(generator=generator) for like in (x, out))

        def run(way: Way, to: Tensor) -> Tensor:
            way(source, matrix, to, residual=to if residual else None, activation=activation)
            return to

        follows = len(x) >= MANY_ROWS and len(x) & (len(x) - 1) != 0 and near and not only_compiling()
        wanted, ways = run(self.by_tiles, start.clone()), near if follows else self._candidates(x, out, activation)
        same = [way for way in ways if torch.equal(run(way, start.clone()), wanted) or only_compiling()]
        if len(x) >= MANY_ROWS and not follows and not only_compiling():
            same.sort(key=lambda way: seconds_of(partial(run, way, start), x.device))
        return [*same, self.by_tiles]

    def _candidates(self, x: Tensor, out: Tensor, activation: int) -> list[Way]:
        fits = out.dtype == x.dtype == torch.bfloat16  # shared memory has room for blocks of 16 bits
        whole = fits and (x.shape[1] | out.shape[1]) % UNITS == 0
        own = [partial(self.by_blocks, block=block) for block in BLOCKS if whole and block.rows < 2 * len(x)]
        first = own[1:2] if activation and len(x) <= GATED_ROWS else []
        return [*first, self.by_library, self.by_whole_library, *own]

    def by_library(
        self, x: Tensor, matrix: CudaMatrix, out: Tensor, *, residual: Tensor | None = None, activation: int = 0
    ) -> None:
        """Compute a product with cuBLAS; parts, a bias or a gate take a launch of their own."""
        bare = matrix.parts == 1 and matrix.bias is None
        if activation or not bare:
            sums = self._library_sums(x, matrix, x.dtype if bare else torch.float32)
            finish(sums, matrix.bias, residual, out, activation=activation, pdl=self.pdl)
        elif residual is not None:
            torch.addmm(residual, x, matrix.q.T, out=out)
        else:
            torch.mm(x, matrix.q.T, out_dtype=out.dtype, out=out)

    by_whole_library = whole_sums()(by_library)  # K is not divided

    @property
    def _libraries(self) -> tuple[Way, ...]:
        return self.by_library, self.by_whole_library

    def by_blocks(
        self,
        x: Tensor,
        matrix: CudaMatrix,
        out: Tensor,
        *,
        block: Block,
        residual: Tensor | None = None,
        activation: int = 0,
    ) -> None:
        """Compute a product with blocks of `many`."""
        product = partial(multiply, x, matrix.q, matrix.bias, residual, out, parts=matrix.parts, block=block)
        product(activation=activation, descriptors=self._descriptors, pdl=self.pdl)

    def _library_sums(self, x: Tensor, matrix: CudaMatrix, dtype: torch.dtype) -> Tensor:
        rows, outputs = len(x), matrix.outputs
        sums = self._temporary((matrix.parts, rows, outputs), dtype, use="sums")
        share = triton.cdiv(matrix.inputs, matrix.parts * UNIT) * UNIT
        if matrix.inputs % share or matrix.parts == 1:
            for part, (left, right) in enumerate(zip(x.split(share, 1), matrix.q.split(share, 1), strict=True)):
                torch.mm(left, right.T, out_dtype=sums.dtype, out=sums[part])
        else:
            left = x.view(rows, matrix.parts, -1).transpose(0, 1)  # [parts, rows, inputs of a part]
            right = matrix.q.view(outputs, matrix.parts, -1).permute(1, 2, 0)
            torch.bmm(left, right, out_dtype=sums.dtype, out=sums)
        return sums

    def _temporary(self, shape: tuple[int, ...], dtype: torch.dtype, *, use: str) -> Tensor:
        """Return scratch memory with a fixed address, shared by products of the same size up to a power of two."""
        bytes = math.prod(shape) * dtype.itemsize
        size = 1 << (bytes - 1).bit_length()
        if (use, size) not in self._scratch:
            self._scratch[use, size] = torch.empty(size, dtype=torch.uint8, device=self.partial.device)
        return self._scratch[use, size][:bytes].view(dtype).view(shape)

    def by_tiles(
        self,
        x: Tensor,
        matrix: CudaMatrix,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        activation: int = 0,
        tiles: Tiles | None = None,
        finished: bool = True,
    ) -> None:
        """Compute a product with own tiles; other `tiles` than the best give the same bits. If it is not to be
        `finished`, spread parts are left in `partial`, and `out` is not written."""
        rows, inputs = x.shape
        tiles = tiles or Tiles.of(
            rows,
            outputs=matrix.outputs,
            parts=matrix.parts,
            gated=activation != 0,
            format=matrix.format,
            size=x.element_size(),
        )
        spread = _spread(x, matrix)
        programs = triton.cdiv(matrix.outputs, tiles.outputs) * triton.cdiv(rows, tiles.rows)
        _linear[(programs, matrix.parts if spread else 1)](
            x,
            matrix.q,
            out,
            out if residual is None else residual,
            out if matrix.bias is None else matrix.bias,
            out if matrix.scale is None else matrix.scale,
            self.partial,
            self.counters,
            rows,
            matrix.outputs,
            inputs,
            triton.cdiv(inputs, matrix.parts * UNIT) * UNIT,
            x.stride(0),
            BLOCK_N=tiles.outputs,
            BLOCK_R=tiles.rows,
            BLOCK_K=tiles.inputs,
            PARTS=matrix.parts,
            SPREAD=spread,
            FINISHED=finished,
            EVEN=inputs % UNIT == 0 and matrix.outputs % tiles.outputs == 0,
            ACTIVATION=activation,
            RESIDUAL=residual is not None,
            BIAS=matrix.bias is not None,
            FORMAT=matrix.format,
            STAGES=tiles.stages,
            AHEAD=_power_below(min(AHEAD, inputs // matrix.parts)) if self.pdl and rows <= FEW_ROWS else 0,
            PDL=self.pdl,
            num_warps=tiles.warps,
            **({"launch_pdl": True} if self.pdl else {}),
        )


@triton.jit
def _add_groups(acc, x, w, scale, r, n, first, last, outputs, inputs, x_stride, known_r, known_n, FORMAT: tl.constexpr):
    """Add the product of the 64 inputs from `first` on, which are two groups of a grouped format.

    A byte of NIBBLES has an input of the first group in its low half, and one of the second in its high half."""
    i = tl.arange(0, 32)
    if FORMAT == 3:  # NIBBLES
        at = w + n[:, None] * (inputs // 2) + first // 2 + i[None, :]
        packed = tl.load(at, mask=known_n[:, None] & (first < last), other=0)
    for group in tl.static_range(2):
        k = first + 32 * group + i
        inside = k < last
        if FORMAT == 3:  # NIBBLES
            q = (packed >> 4) if group else (packed & 15)
        else:
            q = tl.load(w + n[:, None] * inputs + k[None, :], mask=known_n[:, None] & inside[None, :], other=0)
        at = 2 * ((first // 32 + group) * outputs + n)
        known = known_n & (first + 32 * group < last)
        pair = tl.load(scale + at[:, None] + tl.arange(0, 2)[None, :], mask=known[:, None], other=0.0)
        step, low = tl.split(pair.to(tl.float32))
        xt = tl.load(x + r[:, None] * x_stride + k[None, :], mask=known_r[:, None] & inside[None, :], other=0.0)
        weights = (q.to(tl.float32) * step[:, None] + low[:, None]).to(xt.dtype)
        acc = tl.dot(weights, tl.trans(xt), acc, input_precision="ieee")
    return acc


@triton.jit
def _fetch(pointer, rows, first, inputs, known, AHEAD: tl.constexpr):
    """Prefetch AHEAD inputs of these rows of the weights [rows, inputs], 2 bytes each, into the second-level cache."""
    lines = tl.arange(0, AHEAD // 64)
    at = pointer + tl.where(known, rows, 0)[:, None] * inputs + first + lines[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _unpaired(pairs, dtype: tl.constexpr):
    """Convert pairs of e4m3 [outputs, inputs / 2] to `dtype` [outputs, inputs], for one product: of two products in a
    step the machine would compute one after the other, and wait for each."""
    outputs: tl.constexpr = pairs.shape[0]
    blocks: tl.constexpr = pairs.shape[1] // 64
    halves = tl.join(_eighths(pairs, False, dtype), _eighths(pairs, True, dtype))  # [outputs, inputs / 2, 2]
    apart = tl.permute(tl.reshape(halves, (outputs, blocks, 64, 2)), (0, 1, 3, 2))
    return tl.reshape(apart, (outputs, blocks * 128))


@triton.jit
def _eighths(pairs, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Return the low or HIGH bytes of pairs, which are e4m3, as `dtype`, exactly.

    The machine's own conversions are slower than memory. Exponent and mantissa are in the places of bf16 once they are
    4 bits below the sign; a factor of 2^120, the difference of the biases of the exponents, is left."""
    if dtype == tl.bfloat16:
        parts: tl.constexpr = "mov.b32 s, $1; shr.u32 v, $1, 4;" if HIGH else "shl.b32 s, $1, 8; shl.b32 v, $1, 4;"
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 s, v, f; "
            + parts
            + """ and.b32 v, v, 0x07f007f0;
            lop3.b32 v, s, 0x80008000, v, 0xea;
            mov.b32 f, 0x7b807b80;
            mul.bf16x2 $0, v, f; }""",
            "=r,r",
            [pairs],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        value = (pairs >> 8 if HIGH else pairs).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return value


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,  # [rows, inputs]
    w,  # [outputs, inputs]
    out, residual, bias,
    scale,  # float32 [outputs], or [groups, outputs, 2] of a grouped format
    partial,  # float32 [parts, rows, outputs]
    counters,  # int32, all 0 between launches
    rows, outputs, inputs,
    share,  # inputs of a part
    x_stride,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SPREAD: tl.constexpr,
    FINISHED: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
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
        _fetch(w, n, tl.program_id(1) * share, inputs, known_n, AHEAD)
    if AHEAD >= 128 and FORMAT == 4:  # pairs
        _fetch(w, n, tl.program_id(1) * share // 2, tl.cdiv(inputs, 128) * 64, known_n, AHEAD // 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for turn in range(1 if SPREAD else PARTS):
        first = (tl.program_id(1) if SPREAD else turn) * share
        last = tl.minimum(first + share, inputs)
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if FORMAT == 2 or FORMAT == 3:  # GROUPED, NIBBLES
                for step in tl.static_range(BLOCK_K // 64):
                    acc = _add_groups(
                        acc,
                        x,
                        w,
                        scale,
                        r,
                        n,
                        k0 + 64 * step,
                        last,
                        outputs,
                        inputs,
                        x_stride,
                        known_r,
                        known_n,
                        FORMAT,
                    )
            else:
                k = k0 + tl.arange(0, BLOCK_K)
                inside = known_r[:, None] if EVEN else known_r[:, None] & (k < last)[None, :]
                xt = tl.load(x + r[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
                if FORMAT == 4:  # FLOAT8
                    at = k0 // 2 + tl.arange(0, BLOCK_K // 2)
                    place = n[:, None] * (tl.cdiv(inputs, 128) * 64) + at[None, :]
                    wanted = (at // 64 * 128 < last)[None, :]
                else:
                    place, wanted = n[:, None] * inputs + k[None, :], (k < last)[None, :]
                wt = tl.load(w + place) if EVEN else tl.load(w + place, mask=known_n[:, None] & wanted, other=0)
                wt = _unpaired(wt, xt.dtype) if FORMAT == 4 else wt.to(xt.dtype)
                acc = tl.dot(wt, tl.trans(xt), acc, input_precision="ieee")
        total += acc
    if FORMAT == 4:  # FLOAT8, whose scales are powers of two
        total *= tl.load(scale + n, mask=known_n, other=0.0)[:, None]
    total = tl.trans(total)  # [rows, outputs]
    finishes = FINISHED
    if SPREAD:
        at = r[:, None] * outputs + n[None, :]
        known = known_r[:, None] & known_n[None, :]
        size = rows.to(tl.int64) * outputs
        tl.store(partial + tl.program_id(1) * size + at, total, mask=known)
        if FINISHED:
            tl.debug_barrier()
            finishes = tl.atomic_add(counters + program, 1, sem="acq_rel") == PARTS - 1
            if finishes:
                total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
                for part in tl.static_range(PARTS):
                    total += tl.load(partial + part * size + at, mask=known, other=0.0, volatile=True)
                tl.store(counters + program, 0)
    if finishes:
        if FORMAT == 1:  # CHANNEL, whose sums are scaled once all parts are added
            total *= tl.load(scale + n, mask=known_n, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=known_n, other=0.0)[None, :]
        _end(total, out, residual, r, tile, rows, outputs, ACTIVATION, RESIDUAL)


@triton.jit
def _end(total, out, residual, r, tile, rows, outputs, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr):
    """Apply the gate or add the residual, and store a tile of the product."""
    if ACTIVATION > 0:
        total = gated(total, out.dtype.element_ty, ACTIVATION)
        outputs = outputs // 2
    n = tile.to(tl.int64) * total.shape[1] + tl.arange(0, total.shape[1])
    at = r[:, None] * outputs + n[None, :]
    known = (r < rows)[:, None] & (n < outputs)[None, :]
    if RESIDUAL:
        total = added(total, tl.load(residual + at, mask=known, other=0.0), out.dtype.element_ty)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
