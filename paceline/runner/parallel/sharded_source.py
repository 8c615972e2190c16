"""The tensors of a model's files as one shard sees them: it reads its own rows and columns, and never a whole matrix.

A matrix that is split by columns is read in pieces of a few rows, of which all but the shard's columns are dropped.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from torch import Tensor

from paceline.kernels.cpu.pack import Rows, stored
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import Dialect
from paceline.models.weights import TensorSource
from paceline.runner.parallel.split import Piece, Split, piece_of


class ShardedSource:
    """Implements TensorSource. Rows are always floats: formats with blocks cannot be cut everywhere."""

    quantised = False

    def __init__(self, source: TensorSource, config: ModelConfig, *, shard: int, split: Split) -> None:
        self.dialect: Dialect = source.dialect
        self._source = source
        self._shapes = source.shapes()
        names = {name: source.dialect.canonical(name, config) for name in self._shapes}
        self._pieces: dict[str, Piece | None] = {
            name: None if canonical is None else piece_of(canonical, config, shard, split)
            for name, canonical in names.items()
        }

    @property
    def label(self) -> str:
        return self._source.label

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._cut(shape, self._pieces[name]) for name, shape in self._shapes.items()}

    def stored_type(self, name: str) -> object:
        return self._source.stored_type(name)

    def size(self, name: str) -> int:
        whole = self._shapes[name]
        return self._source.size(name) * prod(self._cut(whole, self._pieces[name])) // prod(whole)

    def read_float(self, name: str, start: int, stop: int) -> Tensor:
        piece = self._pieces[name]
        if piece is None:
            return self._source.read_float(name, start, stop)
        if len(self._shapes[name]) == 1:
            return self._source.read_float(name, 0, 1).flatten()[piece.start : piece.stop]
        if piece.axis == "rows":
            return self._source.read_float(name, piece.start + start, piece.start + stop)
        return self._source.read_float(name, start, stop)[:, piece.start : piece.stop].contiguous()

    read_native = read_float

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        return stored(self.read_float(name, start, stop))

    def release(self, name: str, start: int, stop: int) -> None:
        """Do nothing: rows are copies."""

    def files(self) -> list[Path]:
        return self._source.files()

    def blank(self) -> TensorSource:
        raise NotImplementedError("a shard is read, not described: describe the whole model")

    @staticmethod
    def _cut(shape: tuple[int, ...], piece: Piece | None) -> tuple[int, ...]:
        if piece is None:
            return shape
        return (piece.size, *shape[1:]) if piece.axis == "rows" else (*shape[:-1], piece.size)
