"""The part of a model that one rank has, read from the model's files: the same function on rank 0 and on workers."""

from __future__ import annotations

import torch

from paceline.errors import OutOfMemory
from paceline.models.load import open_model
from paceline.models.weights import Progress, Weight, load_weights
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.sharded_decoder import ShardedDecoder
from paceline.runner.parallel.sharded_source import ShardedSource
from paceline.runner.parallel.split import shard_config


def load_part(load: Load, exchange: Exchange, *, progress: Progress | None = None) -> ShardedDecoder:
    """Read the shards of a rank, one after the other."""
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

    try:
        return ShardedDecoder(
            opened.config,
            load.split,
            exchange,
            read,
            num_pages=load.num_pages,
            dtype=load.dtype,
            taps=load.taps,
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise OutOfMemory(
            f"no memory on rank {exchange.rank} for its part of {load.path}: lower kv_memory or max_context, or take "
            "format bf16"
        ) from error


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
