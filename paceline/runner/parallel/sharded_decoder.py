"""The shards of one rank as a decoder: its part of every layer, and the sums over all ranks in between.

Hidden states are whole on every rank and have the same bits there; keys, values and weights are the shard's own. All
ranks call the same methods in the same order. What only rank 0 needs, as logits, only rank 0 gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.kernels.noise import pick
from paceline.kernels.quant import Weight
from paceline.kernels.reference import ReferenceBackend, ReferenceKV
from paceline.models.config import ModelConfig
from paceline.models.decoder import Angles, Decoder, run_layers, scaled
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.gathering import all_heads, all_logits, own_rows
from paceline.runner.parallel.split import INPUTS, Split, shard_config, vocabulary

ReadShard = Callable[[int], Mapping[str, Weight]]  # a shard's weights, by its number


ALIGNMENT = 64  # bytes; torch's own for new tensors


class ShardedDecoder:
    """Implements Part: the shards of a rank with their weights and KV memory, in torch."""

    pick = staticmethod(pick)

    def __init__(
        self,
        config: ModelConfig,
        split: Split,
        exchange: Exchange,
        read: ReadShard,
        *,
        num_pages: int,
        dtype: torch.dtype,
        taps: Sequence[int] = (),
    ) -> None:
        self.config, self._split, self._exchange = config, split, exchange
        self._dtype, self._taps = dtype, taps
        self._numbers = split.of_rank(exchange.rank)
        self._shards = [self._shard(number, read(number)) for number in self._numbers]
        self._backends = [self._backend(number, num_pages) for number in self._numbers]

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Output | None:
        """Run a pass; rank 0 gets its output."""
        kept: list[Tensor] = []
        for backend in self._backends:
            backend.begin(batch)
        angles = self._shards[0].angles(batch.positions)
        layers = [partial(self._layer, index, angles) for index in range(self.config.num_layers)]
        x = scaled(self._embed(batch.tokens), self.config.embedding_scale)
        taps = self._taps if batch.features else ()
        hidden = run_layers(x, layers, states=self._states, taps=taps, kept=kept)
        logits = self._project(self._states(hidden[batch.logit_rows.long()]))
        if logits is None:
            return None
        features = torch.cat(kept, dim=1).float() if kept else None
        states = self._states(hidden).float() if batch.states else None
        argmax = logits.argmax(dim=-1).to(torch.int32)
        return Output(logits=logits, argmax=argmax, features=features, states=states)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed(tokens)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor | None:
        """Compute float32 logits [n, vocab] from states [n, hidden] after the last norm; rank 0 gets them."""
        return self._project(states.to(self._dtype))

    def leading(self, layers: int) -> ShardedDecoder:
        part = copy(self)
        part.config, part._taps = self.config.leading(layers), ()
        part._shards = [shard.leading(layers) for shard in self._shards]
        return part

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for backend in self._backends:
            backend.kv.move(source, target)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Read keys and values of all heads, float32 [layers, n, kv_heads, head_dim]; rank 0 gets them."""
        pairs = [backend.kv.read(slots) for backend in self._backends]
        mine = torch.stack([torch.cat(parts, dim=2) for parts in zip(*pairs, strict=True)])
        return all_heads(self._exchange, mine, self.config, self._split)

    def _layer(self, index: int, angles: Angles, x: Tensor) -> Tensor:
        first = self._shards[0]
        inputs = first.attention_inputs(index, x)
        parts = [shard.attention(index, inputs, angles, backend) for shard, backend in self._both()]
        x = x + first.after_attention(index, self._sum(parts))
        inputs = first.mlp_inputs(index, x)
        parts = [shard.mlp(index, inputs, backend) for shard, backend in self._both()]
        return x + first.after_mlp(index, self._sum(parts))

    def _both(self) -> list[tuple[Decoder, ReferenceBackend]]:
        return list(zip(self._shards, self._backends, strict=True))

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        return self._exchange.sum(parts).to(self._dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up embeddings: those of other shards' tokens are zeros here."""
        parts = []
        for number, shard in zip(self._numbers, self._shards, strict=True):
            low, high = vocabulary(self.config, number, self._split)
            parts.append(own_rows(shard.embed, tokens, low=low, high=high))
        return self._sum(parts)

    def _states(self, hidden: Tensor) -> Tensor:
        return self._shards[0].states(hidden)

    def _project(self, states: Tensor) -> Tensor | None:
        mine = torch.cat([shard.project(states, backend) for shard, backend in self._both()], dim=1)
        return all_logits(self._exchange, mine, self.config, self._split)

    def _shard(self, number: int, weights: Mapping[str, Weight]) -> Decoder:
        """Build a shard. A bias of a sum over shards is added once, by the first."""
        once = () if number == 0 else tuple(f".{name}.bias" for name in INPUTS)
        kept = {name: aligned(weight) for name, weight in weights.items() if not (once and name.endswith(once))}
        return Decoder(shard_config(self.config, number, self._split), kept, dtype=self._dtype)

    def _backend(self, number: int, num_pages: int) -> ReferenceBackend:
        config = shard_config(self.config, number, self._split)
        kv = ReferenceKV(
            layers=config.num_layers,
            num_pages=num_pages,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
        )
        return ReferenceBackend(kv)


def aligned(weight: Weight) -> Weight:
    """Return the weight in memory aligned as new tensors are: a product with one row has other bits elsewhere."""
    if isinstance(weight, Tensor) and weight.data_ptr() % ALIGNMENT:
        return weight.clone()
    return weight
