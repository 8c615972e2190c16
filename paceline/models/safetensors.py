"""Weights of a Hugging Face directory: model.safetensors, or shards with an index. Pickled files are never opened.

Tensors are read lazily, by rows. Neither the index nor a symlink can lead to a file outside of the directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModel
from paceline.kernels.cpu.pack import Rows, stored
from paceline.models.directory import member, read_json
from paceline.models.tensor_names import HUGGING_FACE, Dialect

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsFolder:
    """The tensors of a directory, by name."""

    dialect: Dialect = HUGGING_FACE
    quantised = False

    def __init__(self, directory: Path, *, dtypes: Mapping[str, torch.dtype] = DTYPES, single: str = SINGLE) -> None:
        """`single` is the name of the file that has all tensors, if it exists; otherwise the index names the shards."""
        self.directory = directory
        self._dtypes = dtypes
        self._blank = False  # True: tensors are zeros, not the file's
        self._files = {name: _open(path) for name, path in _shards(directory, single).items()}
        self._tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}  # name → file, shape, dtype
        for file, handle in self._files.items():
            self._list(file, handle)
        self._check_index()

    @property
    def label(self) -> str:
        return str(self.directory)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _) in self._tensors.items()}

    def stored_type(self, name: str) -> torch.dtype:
        return self._dtypes[self._tensors[name][2]]

    def size(self, name: str) -> int:
        _, shape, dtype = self._tensors[name]
        return prod(shape) * self._dtypes[dtype].itemsize

    def read_float(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor, in the file's own dtype."""
        file, shape, dtype = self._tensors[name]
        if self._blank:
            sizes = shape if len(shape) == 1 else (stop - start, *shape[1:])
            return torch.zeros(sizes, dtype=self._dtypes[dtype])
        with _translated(self.directory / file):
            handle = self._files[file]
            rows: Tensor = handle.get_tensor(name) if len(shape) == 1 else handle.get_slice(name)[start:stop]
        return rows

    read_native = read_float

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        return stored(self.read_float(name, start, stop))

    def release(self, name: str, start: int, stop: int) -> None:
        """Do nothing: rows are copies."""

    def files(self) -> list[Path]:
        return [self.directory / file for file in self._files]

    def blank(self) -> SafetensorsFolder:
        other = copy(self)
        other._blank = True
        return other

    def _list(self, file: str, handle: Any) -> None:
        path = self.directory / file
        for name in list(handle.keys()):
            with _translated(path):
                part = handle.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if name in self._tensors:
                raise ModelFileError(f"{path}: tensor {name!r} also stands in {self._tensors[name][0]}")
            if dtype not in self._dtypes:
                raise UnsupportedModel(f"{path}: tensor {name!r} is {dtype}; supported: {', '.join(self._dtypes)}")
            if not shape or 0 in shape:
                raise ModelFileError(f"{path}: tensor {name!r} has the shape {shape}")
            self._tensors[name] = (file, shape, dtype)

    def _check_index(self) -> None:
        for name, file in _weight_map(self.directory).items():
            if name not in self._tensors or self._tensors[name][0] != file:
                raise ModelFileError(f"{self.directory / INDEX}: tensor {name!r} is not in {file}")


def _weight_map(directory: Path) -> dict[str, str]:
    if (directory / SINGLE).exists() or not (directory / INDEX).exists():
        return {}
    path = member(directory, INDEX)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(type(v) is str for v in weight_map.values()):
        raise ModelFileError(f"{path}: weight_map is missing, empty or no mapping from tensors to files")
    return weight_map


def _shards(directory: Path, single: str) -> dict[str, Path]:
    names = [single] if (directory / single).exists() else sorted(set(_weight_map(directory).values()))
    for name in names:
        if PurePosixPath(name).suffix != ".safetensors":
            raise ModelFileError(f"{directory / INDEX}: {name!r:.200} is not a .safetensors file")
    if names:
        return {name: member(directory, name) for name in names}
    others = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
    if others:
        raise UnsupportedModel(
            f"{directory}: weights only as {others[0]}, which can run code when opened; convert them to safetensors "
            "(in transformers: `model.save_pretrained(directory)`)"
        )
    raise ModelFileError(f"{directory}: neither {single} nor {INDEX}")


def _open(path: Path) -> Any:
    with _translated(path):
        return safe_open(path, framework="pt")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error
