"""The part of a model that one rank has, read from the model's files: the same function on rank 0 and on workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import Batch, Output
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.models.weights import Progress, Weight, load_weights
from paceline.runner.loading.rank_threads import keep_to_own_cores
from paceline.runner.parallel.compiled_part import read_compiled
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.sharded_decoder import ShardedDecoder
from paceline.runner.parallel.sharded_source import ShardedSource
from paceline.runner.parallel.split import shard_config


class Part(Protocol):
    """What a rank does of a Forward. All ranks call the same methods in the same order."""

    config: ModelConfig  # of the whole model

    def compute(self, batch: Batch) -> Output | None:
        """Run a pass; rank 0 gets its output."""

    def embed(self, tokens: Tensor) -> Tensor: ...

    def project(self, states: Tensor) -> Tensor | None:
        """Compute float32 logits [n, vocab] from states [n, hidden] after the last norm; rank 0 gets them."""

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        """Draw tokens as Forward does: on rank 0 alone."""

    def leading(self, layers: int) -> Part:
        """Return the first layers with the last norm and the output layer, on the same weights and KV memory."""

    def move(self, source: Sequence[int], target: Sequence[int]) -> None: ...

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Read keys and values of all heads, float32 [layers, n, kv_heads, head_dim]; rank 0 gets them."""


def load_part(load: Load, exchange: Exchange, *, progress: Progress | None = None) -> Part:
    """Read the part of a rank."""
    try:
        use_threads(load.torch_threads)
        if not load.split.packed:
            return _read_shards(load, exchange, progress)
        keep_to_own_cores(exchange.rank, degree=load.split.degree, threads=load.threads)
        return read_compiled(load, exchange, progress)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        smaller = "choose a smaller format such as int4" if load.split.packed else "take format bf16"
        raise OutOfMemory(
            f"no memory on rank {exchange.rank} for its part of {load.path}: lower kv_memory or max_context, or "
            f"{smaller}"
        ) from error


def _read_shards(load: Load, exchange: Exchange, progress: Progress | None) -> ShardedDecoder:
    """Read the shards of a rank for torch, one after the other."""
    opened = open_model(load.path)
    numbers = load.split.of_rank(exchange.rank)

    def read(number: int) -> dict[str, Weight]:
        source = ShardedSource(opened.source, opened.config, shard=number, split=load.split)
        before = number - numbers.start

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(before * total + done, len(numbers) * total)

        config = shard_config(opened.config, number, load.split)
        return load_weights(source, config, format=load.format, progress=report)

    return ShardedDecoder(
        opened.config,
        load.split,
        exchange,
        read,
        num_pages=load.num_pages,
        dtype=load.dtype,
        taps=load.taps,
    )


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
