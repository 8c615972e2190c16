"""Products of rows with a large matrix; of a few rows near the speed at which the matrix can be read from memory.

Every element of a product is the sum, in order, of `parts` sums over consecutive ranges of K; the tensor cores
accumulate each in float32 in steps of 16. On Hopper this fixes the bits: they are equal for every tile shape, for both
kinds of matrix instruction, and for cuBLAS unless it divides K itself. So tiles may depend on the number of rows, while
a row's result never depends on the other rows. `parts` depends on the matrix alone.

    out[r, n] = epilogue( Σ_k x[r, k] · w[n, k] + bias[n] )        epilogue: nothing, + residual, or act(gate) · up

The sum is rounded to the type of `out` before the epilogue. The weight is the first factor (tile [outputs, k] times [k,
rows]), since tensor cores accept few rows only as the second factor. Beyond 64 rows, or 16 if tiles have fewer outputs,
there are several ways: cuBLAS, "the library", which may be told not to divide K, and the blocks of `many`. At the start
the first product of a shape and number of rows tries them on random numbers. Of those with the bits of the tiles it
keeps the library, or from 1,024 rows on the fastest. The library may compute the outputs behind the last whole wave of
its tiles in a second call, see `tiles.whole_waves`. Later, a number of rows that the start has not met takes blocks,
whose bits do not depend on it. For many rows a matrix of groups or 8-bit floats is expanded to floats once, not tile by
tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from paceline.kernels.cuda.compiling import only_compiling
from paceline.kernels.cuda.expand import expand
from paceline.kernels.cuda.formats import CHANNEL, FLOAT, CudaMatrix
from paceline.kernels.cuda.many import BLOCKS, Block, Descriptors, finish, multiply
from paceline.kernels.cuda.tile_product import tile_product
from paceline.kernels.cuda.tiles import FEW_ROWS, SPREAD_ROWS, UNIT, Tiles, tiled_rows, whole_waves
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


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out [rows, outputs] = x · weight with cuBLAS, the outputs behind the last whole wave apart."""
    cut = whole_waves(len(weight), len(x)) or len(weight)
    for some, to in zip(weight.split(cut), out.split(cut, 1), strict=True):
        torch.mm(x, some.T, out_dtype=out.dtype, out=to)


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

    def parts(self, x: Tensor, matrix: CudaMatrix) -> Tensor:
        """Compute the parts of a product without its bias, float32 [parts, rows, outputs], for a kernel that adds them.
        They are in memory that the next product of their size reuses."""
        rows, matrix = len(x), replace(self._ready(matrix, x), bias=None)
        whole = matrix.parts == 1 or matrix.format == CHANNEL  # whose parts are scaled once they are added
        out = self._temporary((1 if whole else matrix.parts, rows, matrix.outputs), torch.float32, use="parts")
        way = self._way(x, matrix, out[0], False, 0)
        if whole:
            way(x, matrix, out[0])
        elif way in self._libraries:
            with whole_sums() if way == self.by_whole_library else nullcontext():
                return self._library_sums(x, matrix, torch.float32)
        else:
            for some in (slice(first, first + SPREAD_ROWS) for first in range(0, rows, SPREAD_ROWS)):
                self.by_tiles(x[some], matrix, out[0, some], finished=False)
                found = self.partial[: matrix.parts * out[0, some].numel()].view(matrix.parts, -1, matrix.outputs)
                if rows <= SPREAD_ROWS:
                    return found
                out[:, some] = found
        return out

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
        blocks = [block for block in BLOCKS if whole and block.rows < 2 * len(x)]
        if len(x) >= MANY_ROWS:
            # Smaller blocks take as long by themselves, and up to 10 % longer in a pass: they load more, and the device
            # is at its power limit.
            blocks = blocks[-1:]
        own = [partial(self.by_blocks, block=block) for block in blocks]
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
            _multiply(x, matrix.q, out)

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
                _multiply(left, right, sums[part])
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
        spread, block = _spread(x, matrix), triton.next_power_of_2(tiles.outputs)
        programs = triton.cdiv(matrix.outputs, tiles.outputs) * triton.cdiv(rows, tiles.rows)
        tile_product[(programs, matrix.parts if spread else 1)](
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
            OUTPUTS=tiles.outputs,
            BLOCK_N=block,
            BLOCK_R=tiles.rows,
            BLOCK_K=tiles.inputs,
            PARTS=matrix.parts,
            SPREAD=spread,
            FINISHED=finished,
            EVEN=inputs % UNIT == 0,
            FULL=tiles.outputs == block and matrix.outputs % block == 0,
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
