"""The tensors of a head's directory: found under any of their published names, and checked.

Matrices are floats, or integers with scales in tensors of their own. Only safetensors files are read.

    8 bits   `o.weight` I8 [n, k]       `o.weight_scale` [n, 1] or [n, k / 32]
    4 bits   `o.weight` U8 [n, k / 2]   `o.weight_scale`, `o.weight_minimum` [n, k / 32]; two values a byte
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.kernels.quant import GROUP, Quantised, Weight, unpack_nibbles
from paceline.models.safetensors import DTYPES, SINGLE, SafetensorsFolder

HEAD_DTYPES = DTYPES | {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}
SCALE, MINIMUM = "_scale", "_minimum"  # ends of tensor names
PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # ends of file names
SINGLES = (SINGLE, "medusa_lm_head.safetensors")


class HeadTensors:
    """Tensors by name. Each is taken once, and `finish` raises if one is left."""

    def __init__(self, directory: Path, *, prefixes: Mapping[str, str], blank: bool = False) -> None:
        """`prefixes` maps the beginning of a published name to its replacement; each that fits is used, in order.
        `blank`: only headers are read, and tensors are on the device "meta"."""
        single = next((name for name in SINGLES if (directory / name).exists()), SINGLE)
        _refuse_pickles(directory, single)
        folder = SafetensorsFolder(directory, dtypes=HEAD_DTYPES, single=single)
        self.label = folder.label
        self.blank = blank
        self._folder = folder
        self._shapes = folder.shapes()
        self._files = {_renamed(name, prefixes): name for name in self._shapes}  # those that were not taken yet
        self._published = dict(self._files)
        used = {prefix: new for prefix, new in prefixes.items() if any(n.startswith(prefix) for n in self._shapes)}
        self._spelling = {new: prefix for prefix, new in used.items() if new}  # beginnings of names → those in the file
        if len(self._files) < len(self._shapes):
            raise ModelFileError(f"{self.label}: two tensors with names for the same thing")

    def part(self, beginning: str, prefixes: Mapping[str, str]) -> HeadTensors:
        """Return the tensors whose published names begin so, renamed. Messages have the published names."""
        other = copy(self)
        other._files = {_renamed(name, prefixes): name for name in self._files.values() if name.startswith(beginning)}
        other._published = dict(other._files)
        other._spelling = {new: prefix for prefix, new in prefixes.items()}
        return other

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._files[name]]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows of a tensor, and leave it where it is; also if only headers are read."""
        return self._folder.read_float(self._files[name], start, stop)

    def files(self) -> list[Path]:
        return self._folder.files()

    def names(self) -> list[str]:
        return list(self._files)

    def matrix(self, name: str, outputs: int, inputs: int) -> Weight:
        """Take the matrix `name`.weight [outputs, inputs]: floats, 8-bit or 4-bit integers."""
        if f"{name}.weight{MINIMUM}" in self:
            return self._in_4_bits(f"{name}.weight", outputs, inputs)
        tensor = self.take(f"{name}.weight", (outputs, inputs))
        if tensor.dtype != torch.int8:
            return self._floating(f"{name}.weight", tensor)
        return self._quantised(f"{name}.weight", tensor)

    def vector(self, name: str, size: int) -> Tensor:
        return self._floating(name, self.take(name, (size,))).float()

    def flat(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Take a tensor of floats of any shape as a vector."""
        return self._floating(name, self.take(name, shape)).float().flatten()

    def integers(self, name: str, size: int) -> Tensor:
        tensor = self.take(name, (size,))
        if tensor.is_floating_point():
            raise ModelFileError(f"{self._spoken(name)} holds {tensor.dtype}; whole numbers are needed")
        return tensor if self.blank else tensor.long()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise ModelFileError(f"{self.label}: tensor {self._name(name)!r} {list(shape)} is missing")
        file = self._files.pop(name)
        if self._shapes[file] != shape:
            raise ModelFileError(
                f"{self.label}: tensor {file!r} is {list(self._shapes[file])}; by config.json and the target it must "
                f"be {list(shape)}"
            )
        if self.blank:
            return _described(shape, self._folder.stored_type(file))
        return self._folder.read_float(file, 0, shape[0])

    def leave(self, *names: str) -> None:
        for name in names:
            self._files.pop(name, None)

    def finish(self, keys: Mapping[str, str]) -> None:
        """Raise if a tensor is left. `keys`: parts of names → what config.json says where such tensors are read."""
        if not self._files:
            return
        count, some = len(self._files), ", ".join(sorted(self._files.values())[:4])
        asking = [said for part, said in keys.items() if any(part in name for name in self._files)]
        other = f", or a config.json with {' and '.join(dict.fromkeys(asking))}" if asking else ""
        raise ModelFileError(
            f"{self.label}: {count} tensor{'s' if count > 1 else ''} that no head of this kind has: {some}; a file "
            f"without {'them' if count > 1 else 'it'} would fit{other}"
        )

    def _quantised(self, name: str, q: Tensor) -> Quantised:
        groups = next((g for g in (1, q.shape[1] // GROUP) if self._shape(name + SCALE) == (len(q), g)), 1)
        scale = self._scale(name + SCALE, (len(q), groups))
        if not self.blank and bool((scale < 0).any()):
            raise ModelFileError(f"{self._spoken(name + SCALE)} holds something that is no scale")
        if self.blank:
            return Quantised(q=_described(q.shape, torch.uint8), scale=scale, minimum=scale, bits=8)
        return Quantised(q=(q.to(torch.int16) + 128).to(torch.uint8), scale=scale, minimum=-128 * scale, bits=8)

    def _in_4_bits(self, name: str, outputs: int, inputs: int) -> Quantised:
        packed = self.take(name, (outputs, inputs // 2))
        if packed.dtype != torch.uint8 or inputs % GROUP:
            raise ModelFileError(
                f"{self._spoken(name)} holds {packed.dtype} for {inputs} inputs; with minimums beside it, it must be "
                f"4 bits, two a byte, and the inputs a multiple of {GROUP}"
            )
        groups = (outputs, inputs // GROUP)
        scale, minimum = (self._scale(name + end, groups) for end in (SCALE, MINIMUM))
        q = _described((outputs, inputs), torch.uint8) if self.blank else unpack_nibbles(packed)
        return Quantised(q=q, scale=scale, minimum=minimum, bits=4)

    def _scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        scale = self._floating(name, self.take(name, shape)).float()
        if not self.blank and not bool(torch.isfinite(scale).all()):
            raise ModelFileError(f"{self._spoken(name)} holds something that is no scale")
        return scale

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(self._files.get(name, ""))

    def _floating(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise ModelFileError(f"{self._spoken(name)} holds {tensor.dtype}; floats are needed")
        return tensor

    def _name(self, name: str) -> str:
        """Return the name that the file has for a tensor, or would have."""
        return self._published.get(name) or _renamed(name, self._spelling)

    def _spoken(self, name: str) -> str:
        return f"{self.label}: {self._name(name)}"


def _described(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, new in prefixes.items():
        if name.startswith(prefix):
            name = new + name[len(prefix) :]
    return name


def _refuse_pickles(directory: Path, single: str) -> None:
    """Raise if a head comes as pickle alone: reading one runs the code that it contains."""
    if (directory / single).exists() or any(directory.glob("*.safetensors*")):
        return
    pickles = sorted(path.name for end in PICKLES for path in directory.glob(f"*{end}"))
    if pickles:
        raise ModelFileError(
            f"{directory}: {pickles[0]} is a pickle, which can run code when it is read; convert it to {SINGLE}"
        )
