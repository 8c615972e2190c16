"""The tensors of a model's files as one shard sees them: it reads its own rows and columns, and never a whole matrix.

A matrix that is split by columns is read in pieces of a few rows, of which all but the shard's columns are dropped:
here as floats, or by the kernels that pack them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from torch import Tensor

from paceline.kernels.cpu.pack import Rows
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import Dialect
from paceline.models.weights import TensorSource
from paceline.runner.parallel.split import Piece, Split, piece_of


class ShardedSource:
    """Implements TensorSource."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, *, shard: int, split: Split, whole: Sequence[str] = ()
    ) -> None:
        """`whole`: canonical tensors that are not cut."""
        self.dialect: Dialect = source.dialect
        self.quantised = source.quantised
        self._source = source
        self._shapes = source.shapes()
        names = {name: source.dialect.canonical(name, config) for name in self._shapes}
        self._pieces: dict[str, Piece | None] = {
            name: None if canonical is None or canonical in whole else piece_of(canonical, config, shard, split)
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
        if piece is not None and len(self._shapes[name]) == 1:
            return self._source.read_float(name, 0, 1).flatten()[piece.start : piece.stop]
        rows = self._source.read_float(name, *self._rows(name, start, stop))
        if piece is None or piece.axis == "rows":
            return rows
        return rows[:, piece.start : piece.stop].contiguous()

    read_native = read_float  # of floats: whole rows of blocks go to kernels by `read_stored`

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        """Return whole rows, of which kernels take the columns of the shard once they have quantised them."""
        piece, rows = self._pieces[name], self._source.read_stored(name, *self._rows(name, start, stop))
        if piece is None or piece.axis == "rows":
            return rows
        return replace(rows, width=self._shapes[name][1], left=piece.start)

    def release(self, name: str, start: int, stop: int) -> None:
        self._source.release(name, *self._rows(name, start, stop))

    def _rows(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of the whole matrix that are rows [start, stop) of the shard."""
        piece = self._pieces[name]
        first = piece.start if piece is not None and piece.axis == "rows" else 0
        return first + start, first + stop

    def files(self) -> list[Path]:
        return self._source.files()

    def blank(self) -> TensorSource:
        raise NotImplementedError("a shard is read, not described: describe the whole model")

    @staticmethod
    def _cut(shape: tuple[int, ...], piece: Piece | None) -> tuple[int, ...]:
        if piece is None:
            return shape
        return (piece.size, *shape[1:]) if piece.axis == "rows" else (*shape[:-1], piece.size)
