"""Compiled parts for tests: ranks as threads of this process, each with threads of its own, and weights in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.kernels.cpu import program
from paceline.kernels.cpu.pack import Rows, stored
from paceline.kernels.cpu.pool import thread_pool
from paceline.kernels.cpu.segment import Segment, new_segment
from paceline.models.config import ModelConfig
from paceline.models.weights import Format
from paceline.runner.loading.pack_store import SIZE_VARIABLE
from paceline.runner.parallel.compiled_part import CompiledPart, pack_of_rank
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.split import plan_split
from tests.runner.parallel.split_models import PAGES, PATIENCE, Threads


class SameNames:
    """Implements Dialect: names are canonical."""

    def canonical(self, name: str, config: ModelConfig) -> str | None:
        return name

    def harmless(self, name: str, config: ModelConfig) -> bool:
        return False

    def row_order(self, canonical: str, config: ModelConfig) -> Tensor | None:
        return None

    def convert(self, canonical: str, weight: Any, config: ModelConfig) -> Any:
        return weight


class Held:
    """Implements TensorSource: float weights in memory."""

    dialect = SameNames()
    quantised = False
    label = "memory"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def stored_type(self, name: str) -> object:
        return "F32"

    def size(self, name: str) -> int:
        return self._weights[name].nbytes

    def read_float(self, name: str, start: int, stop: int) -> Tensor:
        weight = self._weights[name]
        return weight if weight.dim() == 1 else weight[start:stop]

    read_native = read_float

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        return stored(self.read_float(name, start, stop))

    def release(self, name: str, start: int, stop: int) -> None:
        pass

    def files(self) -> list[Path]:
        return []

    def blank(self) -> Held:
        return self


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each program threads of its own, as in a process of its own, and pack without the cache."""
    monkeypatch.setattr(program, "thread_pool", thread_pool.__wrapped__)
    monkeypatch.setenv(SIZE_VARIABLE, "0")


@contextmanager
def segments(size: int, *, timeout: float = PATIENCE, pipes: Sequence[int] = ()) -> Iterator[list[Segment]]:
    """The same memory as each rank sees it."""
    descriptor = new_segment(size)
    try:
        yield [Segment(descriptor, rank=rank, size=size, timeout=timeout, pipes=pipes) for rank in range(size)]
    finally:
        os.close(descriptor)


@dataclass
class CompiledRanks:
    """The ranks of one group with their parts of a model."""

    threads: Threads
    parts: list[CompiledPart]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        degree: int,
        *,
        format: Format = "int4",
        same_bits: bool = False,
        taps: Sequence[int] = (),
        threads: Sequence[int] = (1, 1, 1, 1),
        num_pages: int = PAGES,
        timeout: float = PATIENCE,
        pipes: Sequence[int] = (),
    ) -> CompiledRanks:
        """`threads`: of each rank."""
        split = plan_split("tiny", config, degree=degree, same_bits=same_bits, packed=True)
        ranks = Threads.of(degree)
        if degree > 1:
            with segments(degree, timeout=timeout, pipes=pipes) as made:
                for exchange, segment in zip(ranks.exchanges, made, strict=True):
                    exchange.segment = segment

        def part(rank: int, exchange: Exchange) -> CompiledPart:
            load = Load(0, "tiny", format, split, num_pages, torch.float32, tuple(taps), threads=threads[rank])
            pack = pack_of_rank(load, Held(weights), config, rank=rank)
            options: dict[str, Any] = {"num_pages": num_pages, "threads": threads[rank], "taps": taps}
            return CompiledPart(config, split, exchange, pack, **options)

        return cls(ranks, ranks.each(part))

    def compute(self, batch: Batch) -> Output:
        first, *others = self.threads.each(lambda rank, exchange: self.parts[rank].compute(batch))
        assert first is not None
        assert others == [None] * len(others), "only rank 0 gets an output"
        return first

    def read(self, slots: Tensor) -> Tensor:
        """Keys and values, stacked."""
        pair = self.threads.each(lambda rank, exchange: self.parts[rank].read(slots))[0]
        assert pair is not None
        return torch.stack(pair)
