"""GGUF files of versions 2 and 3: header, metadata and tensor infos are read strictly, tensor data is memory-mapped.

    magic version counts │ metadata … │ tensor infos … │ padding │ tensor data …

Every count, length, offset, type and overlap is checked against the size of the file before it is used. A damaged or
inconsistent file raises ModelFileError; a sound file that is too new or too unusual raises UnsupportedModel.
This module does not know what the tensors mean.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModel
from paceline.kernels.cpu.abi import Stored
from paceline.kernels.cpu.pack import Rows, stored
from paceline.kernels.quant import Quantised
from paceline.models.gguf_blocks import float_rows, native_rows
from paceline.models.gguf_values import MAX_NAME, Cursor, metadata_at
from paceline.models.tensor_names import GGUF, Dialect

MAX_TENSORS = 1 << 16
MAX_ALIGNMENT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file. `shape` is [out, in], the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int  # byte offset in the file
    size: int  # bytes


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, rows of a tensor on demand."""

    dialect: Dialect = GGUF
    quantised: bool  # True: at least one tensor is quantised

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blank = False  # True: rows are zeros, not the file's
        self._data = _map(path)
        cursor = Cursor(self._data, str(path))
        tensor_count = _header(cursor)
        self.metadata = metadata_at(cursor)
        self.tensors = _tensor_infos(cursor, tensor_count, self.metadata)
        self.quantised = any(GGML_QUANT_SIZES[info.type][0] > 1 for info in self.tensors.values())

    @property
    def label(self) -> str:
        return str(self.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return self.tensors[name].type

    def size(self, name: str) -> int:
        return self.tensors[name].size

    def read_float(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor as floats: floats keep their type, quantised rows become float32."""
        return float_rows(self._rows(name, start, stop), self.tensors[name].type, self._where(name))

    def read_native(self, name: str, start: int, stop: int) -> Tensor | Quantised:
        """Read rows [start, stop) of a matrix in the kernels' format that is nearest to the file's."""
        return native_rows(self._rows(name, start, stop), self.tensors[name].type, self._where(name))

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        """Read rows [start, stop) of a matrix as they are stored if kernels can read them so, and else as floats."""
        kind, data = self.tensors[name].type, self._rows(name, start, stop)
        if kind.name in Stored.__members__:
            return Rows(Stored[kind.name], data)
        return stored(float_rows(data, kind, self._where(name)))

    def release(self, name: str, start: int, stop: int) -> None:
        """Unmap the pages of rows that were read. They stay in the system's cache while there is room."""
        info = self.tensors[name]
        stride = info.size // prod(info.shape[:-1])
        first = -(-(info.start + start * stride) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.start + stop * stride - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, first, length)

    def files(self) -> list[Path]:
        return [self.path]

    def blank(self) -> GgufFile:
        other = copy(self)
        other._blank = True
        return other

    def _where(self, name: str) -> str:
        return f"{self.path}: tensor {name!r}"

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        stride = info.size // rows
        if self._blank:
            return np.zeros((stop - start, stride), np.uint8)
        flat = np.frombuffer(self._data, np.uint8, (stop - start) * stride, info.start + start * stride)
        return flat.reshape(stop - start, stride)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelFileError(f"{path}: cannot be read ({error})") from error


def _header(cursor: Cursor) -> int:
    start = cursor.take(4, "the magic number")
    if cursor.data[start : cursor.at] != b"GGUF":
        raise ModelFileError(f"{cursor.source}: not a GGUF file (it does not start with 'GGUF')")
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{cursor.source}: GGUF version {version}; Paceline reads versions 2 and 3, little-endian. Convert it anew."
        )
    count = cursor.u64("the number of tensors")
    if count > MAX_TENSORS:
        raise cursor.fail(f"claims {count} tensors, more than {MAX_TENSORS}")
    return count


def _tensor_infos(cursor: Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r:.50}; allowed: a power of two up to {MAX_ALIGNMENT}")
    makers: dict[str, Callable[[int], TensorInfo]] = {}
    for _ in range(count):
        name, make = _tensor_info(cursor, alignment)
        if name in makers:
            raise cursor.fail(f"tensor {name!r} stands twice")
        makers[name] = make
    base = -(-cursor.at // alignment) * alignment
    infos = {name: make(base) for name, make in makers.items()}
    _check_places(cursor, infos)
    return infos


def _tensor_info(cursor: Cursor, alignment: int) -> tuple[str, Callable[[int], TensorInfo]]:
    """Read a tensor's name and info. The info is a function of the offset at which all tensor data starts."""
    name = cursor.text("a tensor name", MAX_NAME)
    rank = cursor.u32(f"the rank of {name!r}")
    if not 1 <= rank <= 4:
        raise cursor.fail(f"tensor {name!r} has {rank} dimensions; allowed: 1 to 4")
    shape = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(rank))[::-1]
    number = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModel(f"{cursor.source}: tensor {name!r} has the unknown type {number}") from error
    block, block_size = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} of shape {shape} cannot be {kind.name} (blocks of {block})")
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} lies at offset {offset}, not a multiple of the alignment {alignment}")
    size = prod(shape) // block * block_size
    return name, lambda base: TensorInfo(name, shape, kind, base + offset, size)


def _check_places(cursor: Cursor, infos: Mapping[str, TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(infos.values(), key=lambda info: info.start):
        if info.start + info.size > cursor.size:
            raise cursor.fail(f"truncated: tensor {info.name!r} ends at byte {info.start + info.size}")
        if info.start < end:
            raise cursor.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.start + info.size, info.name
