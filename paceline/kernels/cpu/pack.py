"""A pack: all weights of a compiled program, matrices in tiles and vectors, side by side in one piece of memory.

A `Layout` says where each of them lies. It follows from names, shapes and formats alone, before any weight is read.
A `Pack` is a layout with its memory: written once, weight by weight, then read by programs and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_uint64, memmove
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import OutOfMemory, UnsupportedModel
from paceline.kernels.cpu.abi import TILE, Format, Status, Stored, StoredRows
from paceline.kernels.cpu.build import Library, load_library
from paceline.kernels.cpu.first_touch import touch_by_node
from paceline.kernels.cpu.memory import CACHE_LINE_BYTES, Region
from paceline.kernels.cpu.pool import default_threads, thread_pool
from paceline.kernels.cpu.topology import read_machine
from paceline.kernels.quant import GROUP, Quantised, Weight, quantise

VECTOR = -1  # format of numbers without tiles, 4 bytes each
STORED = {torch.float32: Stored.F32, torch.float16: Stored.F16, torch.bfloat16: Stored.BF16}


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix with its bias: in tiles of 16 outputs, or row by row with its scales (`Layout.rows`)."""

    address: int
    stride: int  # bytes from tile to tile
    format: Format
    outputs: int
    inputs: int
    bias: Tensor | None = None  # of `Layout.rows`: the scales of its rows
    column: int = 0  # first column of its outputs in the output buffer

    def columns(self, first: int, count: int) -> Packed:
        """Return the part that reads inputs [first, first + count). The bias belongs to the part of the first input."""
        if count == self.inputs:
            return self
        assert self.format in (Format.GROUP8, Format.GROUP4), "the scale of a channel is that of all its inputs"
        group_bytes = self.stride // (self.inputs // GROUP)
        address, bias = self.address + first // GROUP * group_bytes, None if first else self.bias
        return replace(self, address=address, inputs=count, bias=bias)


@dataclass(frozen=True, slots=True)
class Item:
    """The place of a matrix or vector in a pack."""

    format: int  # Format, or VECTOR
    outputs: int
    inputs: int
    offset: int  # bytes
    stride: int  # bytes from tile to tile


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix as a file stores them."""

    kind: Stored
    data: np.ndarray[Any, np.dtype[np.uint8]]  # [rows, bytes of a row]
    width: int | None = None  # inputs of a row; None: those of the matrix
    left: int = 0  # inputs of a row before the first that the matrix has


class Layout:
    """Places of matrices and vectors by name, in the order in which they are added. Lay out what a pass reads in order.

    A vector `NAME.bias` is the bias of the matrix NAME."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.items: dict[str, Item] = {}
        self.size = 0  # bytes

    def tiles(self, *matrices: tuple[str, Format, int, int]) -> None:
        """Add matrices (name, format, outputs, inputs), interleaved tile by tile: gates read two of them so."""
        sizes = [int(self._library.paceline_tile_bytes(format, inputs)) for _, format, _, inputs in matrices]
        assert len({outputs for _, _, outputs, _ in matrices}) == 1, "interleaved matrices have the same outputs"
        offset, stride = self._take(-(-matrices[0][2] // TILE) * sum(sizes)), sum(sizes)
        for (name, format, outputs, inputs), size in zip(matrices, sizes, strict=True):
            self._add(name, Item(format, outputs, inputs, offset, stride))
            offset += size

    def half(self, name: str, outputs: int, inputs: int) -> None:
        """Add a matrix in fp16, for products with float inputs."""
        assert outputs % TILE == 0, f"{outputs} outputs are not a multiple of {TILE}"
        self._add(name, Item(Format.HALF, outputs, inputs, self._take(2 * outputs * inputs), 2 * TILE * inputs))

    def rows(self, name: str, outputs: int, inputs: int) -> None:
        """Add a matrix in 8 bits, row by row, for products with some of its rows. Its scales are its bias."""
        self._add(name, Item(Format.CHANNEL8, outputs, inputs, self._take(outputs * inputs), inputs))
        self.vector(f"{name}.bias", outputs)

    def vector(self, name: str, count: int) -> None:
        """Add `count` numbers, followed by zeros up to a multiple of a tile."""
        padded = -(-count // TILE) * TILE
        self._add(name, Item(VECTOR, padded, count, self._take(4 * padded), 4))

    @property
    def formats(self) -> set[int]:
        return {item.format for item in self.items.values()}

    def matrices(self) -> list[tuple[int, int, int]]:
        """List the place of each matrix: offset, and number and distance of its tiles, or of its rows."""
        found = [item for item in self.items.values() if item.format != VECTOR]
        return [(i.offset, i.outputs if i.stride == i.inputs else -(-i.outputs // TILE), i.stride) for i in found]

    def _take(self, size: int) -> int:
        offset = self.size
        self.size += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return offset

    def _add(self, name: str, item: Item) -> None:
        assert name not in self.items, f"{name} is laid out twice"
        self.items[name] = item


class Pack:
    """Weights in memory by the places of a layout. Those of another pack may complete it (`complete`)."""

    def __init__(self, layout: Layout, *, threads: int | None = None) -> None:
        self.library = load_library()
        self.layout = layout
        self._rest: Pack | None = None
        self.memory = Region(layout.size, what="the model's weights")
        count = threads or default_threads()
        self._pool = thread_pool(self.library, count)
        touch_by_node(self.memory, layout.matrices(), read_machine(), count)

    def __contains__(self, name: str) -> bool:
        return name in self.layout.items or (self._rest is not None and name in self._rest)

    def complete(self, rest: Pack) -> None:
        """Read all weights that this pack lacks from another one, and keep that one's memory."""
        self._rest = rest

    def matrix(self, name: str) -> Packed:
        if self._rest is not None and name not in self.layout.items:
            return self._rest.matrix(name)
        item = self.layout.items[name]
        bias = self._numbers(f"{name}.bias", padded=True) if f"{name}.bias" in self else None
        address, format = self.memory.address + item.offset, Format(item.format)
        return Packed(address, item.stride, format, outputs=item.outputs, inputs=item.inputs, bias=bias)

    def vector(self, name: str) -> Tensor:
        """Return the numbers of a vector, float32, in the memory of the pack."""
        if self._rest is not None and name not in self.layout.items:
            return self._rest.vector(name)
        return self._numbers(name, padded=False)

    def _numbers(self, name: str, *, padded: bool) -> Tensor:
        item = self.layout.items[name]
        assert item.format == VECTOR, f"{name} is a matrix"
        count = item.outputs if padded else item.inputs
        return torch.frombuffer((c_float * count).from_address(self._address(item)), dtype=torch.float32)

    def _address(self, item: Item) -> int:
        return self.memory.address + item.offset

    # ── writing ──

    def write(self, name: str, weight: Weight) -> None:
        """Write a whole weight. A float matrix becomes 8 bits in groups if it lies in tiles of integers."""
        item = self.layout.items[name]
        if isinstance(weight, Quantised):
            self._write_quantised(item, weight)
            return
        assert isinstance(weight, Tensor), f"{name}: there is no compiled kernel for 8-bit floats"
        if item.format == VECTOR:
            self._copy(item, weight.detach() if weight.dtype == torch.int32 else weight.detach().float())
        elif item.format == Format.HALF:
            tiles = weight.detach().float().view(-1, TILE, item.inputs).transpose(1, 2).half()
            self._copy(item, tiles)
        else:
            assert self.write_rows(name, stored(weight)), f"{name} holds numbers that are not finite"

    def write_rows(
        self, name: str, rows: Rows, *, first: int = 0, places: Tensor | None = None, keep: bool = False
    ) -> bool:
        """Pack rows of a matrix as a file stores them, on all threads; False: a weight is not finite.

        They are outputs `first` and those after it, or int32 `places`. `keep`: the file's integers are kept where the
        kernels have their format; otherwise rows are quantised from their floats. A matrix that has a part of
        each row gets the bits that this part has in the whole."""
        item = self.layout.items[name]
        data = np.ascontiguousarray(rows.data)
        width = rows.width or item.inputs
        given = StoredRows(data.ctypes.data, None, data.shape[1], rows.kind, keep, first, len(data), width, rows.left)
        if places is not None:
            given.places = places.data_ptr()
        arguments = self._address(item), item.stride, item.format, item.inputs, byref(given)
        status = self.library.paceline_pack_stored(self._pool, *arguments)
        if status == Status.OUT_OF_MEMORY:
            raise OutOfMemory("no memory to pack weights")
        return bool(status == Status.FINE)

    def write_in_8_bits(self, name: str, weight: Tensor) -> None:
        """Write a matrix of `Layout.rows`."""
        quantised = quantise(weight)
        # Unsigned bytes less 128, as signed ones: the highest bit is flipped.
        self._copy(self.layout.items[name], quantised.q.bitwise_xor_(128))
        self._copy(self.layout.items[f"{name}.bias"], quantised.scale[:, 0])

    def _write_quantised(self, item: Item, weight: Quantised) -> None:
        assert weight.bits == 4 or weight.symmetric, "8-bit weights are scale * (q - 128)"
        outputs, inputs = weight.q.shape
        dtype = torch.float32 if item.format == Format.CHANNEL8 else torch.float16
        q, scale, minimum = (part.contiguous() for part in (weight.q, weight.scale.to(dtype), weight.minimum.to(dtype)))
        pointers = q.data_ptr(), scale.data_ptr(), minimum.data_ptr() if item.format == Format.GROUP4 else None
        self.library.paceline_pack(self._address(item), item.stride, item.format, outputs, inputs, *pointers)

    def _copy(self, item: Item, tensor: Tensor) -> None:
        whole = tensor.contiguous()
        memmove(self._address(item), whole.data_ptr(), whole.nbytes)

    def checksum(self) -> int:
        found = c_uint64()
        if self.library.paceline_checksum(self._pool, self.memory.address, self.layout.size, byref(found)):
            raise OutOfMemory("no memory to check packed weights")
        return found.value


def stored(weight: Tensor) -> Rows:
    """View a float matrix as rows of a file."""
    whole = weight.detach().contiguous()
    return Rows(STORED[whole.dtype], whole.view(torch.uint8).numpy())


def tile_format(weight: Weight) -> Format:
    """Return the format in which kernels read a matrix. Floats become 8 bits in groups."""
    inputs = (weight if isinstance(weight, Tensor) else weight.q).shape[1]
    if inputs % GROUP:
        raise UnsupportedModel(f"a matrix with {inputs} inputs; the CPU kernels need a multiple of {GROUP}")
    if not isinstance(weight, Quantised):
        return Format.GROUP8
    return Format.GROUP4 if weight.bits == 4 else Format.GROUP8 if weight.grouped else Format.CHANNEL8


def lay_out(
    layout: Layout, weights: Sequence[tuple[str, Weight]], *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Add matrices, interleaved, with the names and formats of weights whose data may be missing. `shapes`: those of
    the parts that the pack has; None: it has all of each matrix."""
    sizes = [_shape(weight) if shapes is None else shapes[name] for name, weight in weights]
    places = zip(weights, sizes, strict=True)
    layout.tiles(*((name, tile_format(weight), size[0], size[1]) for (name, weight), size in places))


def _shape(weight: Weight) -> tuple[int, int]:
    outputs, inputs = (weight if isinstance(weight, Tensor) else weight.q).shape
    return outputs, inputs
