"""The part of a rank as a compiled program: its heads, MLP columns and tokens, with sums across ranks inside the pass.

It is bitwise, as the program of a whole model is: the order of every sum depends on the split, and on no other row.
Weights have the bits that they have in the whole model, since rows are quantised before they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.kernels.cpu.pack import Layout, Pack
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.models.tensor_names import expected_shapes
from paceline.models.weights import Progress, TensorSource, Weight, describe_weights
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.decoder_pack import decoder_layout, read_decoder
from paceline.runner.forwards.share import Share
from paceline.runner.loading.pack_cache import Origin, cached
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.gathering import all_heads, all_logits, own_rows
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.sharded_source import ShardedSource
from paceline.runner.parallel.split import INPUTS, Split, inputs_of_shards, shard_config, vocabulary

ONCE = tuple(f".{kind}.bias" for kind in INPUTS)  # added by the first rank alone


class CompiledPart:
    """Implements Part."""

    def __init__(
        self,
        config: ModelConfig,
        split: Split,
        exchange: Exchange,
        pack: Pack,
        *,
        num_pages: int,
        threads: int,
        max_context: int | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """`pack`: the weights of the rank."""
        rank = exchange.rank
        self.config, self._split, self._exchange = config, split.by_ranks, exchange
        self._low, self._high = vocabulary(config, rank, self._split)
        inputs = {kind: inputs_of_shards(kind, config, rank, split) for kind in INPUTS}
        self._forward = CompiledForward(
            shard_config(config, rank, self._split),
            pack,
            num_pages=num_pages,
            threads=threads,
            max_context=max_context,
            taps=taps,
            share=Share(config.vocab_size, self._low, inputs, exchange.segment),
        )

    def compute(self, batch: Batch) -> Output | None:
        mine = self._forward.run(batch)
        outs = len(batch.logit_rows)
        if not outs and self._exchange.rank == 0:
            return replace(mine, logits=torch.empty((0, self.config.vocab_size)))
        if not outs:
            return None
        logits = all_logits(self._exchange, mine.logits, self.config, self._split)
        best = self._exchange.gather(mine.argmax, [(outs,)] * self._split.degree)
        return None if logits is None else replace(mine, logits=logits, argmax=self._highest(logits, best))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._exchange.sum([own_rows(self._forward.embed, tokens, low=self._low, high=self._high)])

    def project(self, states: Tensor) -> Tensor | None:
        return all_logits(self._exchange, self._forward.project(states), self.config, self._split)

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return self._forward.pick(logits, inverse_temperatures, keys)

    def leading(self, layers: int) -> CompiledPart:
        part = copy(self)
        part.config, part._forward = self.config.leading(layers), self._forward.leading(layers)
        return part

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._forward.kv.move(source, target)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        return all_heads(self._exchange, torch.stack(self._forward.kv.read(slots)), self.config, self._split)

    def _highest(self, logits: Tensor, best: Sequence[Tensor]) -> Tensor:
        """Return the best token of each row, int32, from the best of each rank: of equal ones the lowest, never NaN."""
        firsts = [vocabulary(self.config, rank, self._split)[0] for rank in range(self._split.degree)]
        tokens = torch.stack([own.long() + first for own, first in zip(best, firsts, strict=True)], dim=1)
        values = logits.gather(1, tokens)  # [outs, ranks]
        rank = values.masked_fill(values.isnan(), -torch.inf).argmax(dim=1, keepdim=True)
        return tokens.gather(1, rank).squeeze(1).int()


def read_compiled(load: Load, exchange: Exchange, progress: Progress | None = None) -> CompiledPart:
    """Read the weights of a rank, from the cache of packs if they are there."""
    opened = open_model(load.path)
    pack = pack_of_rank(load, opened.source, opened.config, rank=exchange.rank, progress=progress)
    return CompiledPart(
        opened.config,
        load.split,
        exchange,
        pack,
        num_pages=load.num_pages,
        threads=load.threads,
        max_context=load.max_context,
        taps=load.taps,
    )


def layout_of_rank(described: Mapping[str, Weight], config: ModelConfig, split: Split, *, rank: int) -> Layout:
    """Lay out the packed weights of a rank. `described`: all weights of the model, without data."""
    own = shard_config(config, rank, split.by_ranks)
    shapes = {name: shape for name, shape in expected_shapes(own).items() if rank == 0 or not name.endswith(ONCE)}
    return decoder_layout(described, shapes=shapes)


def pack_of_rank(
    load: Load, source: TensorSource, config: ModelConfig, *, rank: int, progress: Progress | None = None
) -> Pack:
    """Return the packed weights of a rank. Each matrix has the format that it has in the whole model."""
    split = load.split.by_ranks
    own, part = shard_config(config, rank, split), ShardedSource(source, config, shard=rank, split=split)
    layout = layout_of_rank(describe_weights(source, config, format=load.format), config, split, rank=rank)
    name = f"{Path(load.path).name}, rank {rank} of {split.degree}"
    origin = Origin(name, tuple(source.files()), load.format, (own, rank, split))

    def fill(pack: Pack) -> None:
        read_decoder(pack, part, own, format=load.format, progress=progress)

    pack = cached(layout, origin, fill, threads=load.threads)
    if progress:
        progress(pack.layout.size, pack.layout.size)
    return pack
