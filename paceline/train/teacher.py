"""The target as a teacher: whole texts in, features and the hidden states its head reads out. Never trained.

It is the decoder that the engine runs, over sequences that lie side by side instead of in pages:

    row b * length + i   is token i of sequence b, padded at the end, where nobody who counts looks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Batch, KVMemory
from paceline.kernels.quant import Weight, dequantise
from paceline.kernels.reference import embed, linear
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel
from paceline.models.rope import turns
from paceline.train.fused import norm


@dataclass(frozen=True, slots=True)
class Insight:
    """What the target thinks of a batch of texts."""

    features: Tensor  # [sequences, length, layers * hidden] the residual stream that enters the layers asked for
    hidden: Tensor  # [sequences, length, hidden] after the last norm


class Teacher:
    def __init__(self, model: LoadedModel, *, layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.config: ModelConfig = model.config
        self._layers = tuple(layers)
        weights = {name: w if isinstance(w, Tensor) else dequantise(w) for name, w in model.weights.items()}
        self._decoder = _Observed(model.config, weights, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Insight:
        hidden, features = self._decoder.observe(ids, self._layers)
        shape = (*ids.shape, -1)
        return Insight(features=torch.cat(features, dim=-1).view(shape), hidden=hidden.view(shape))

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]"""
        return self._weight("embed" if self.config.tied_head else "head")

    @property
    def norm(self) -> Tensor:
        """The weights of the norm before the head [hidden]."""
        return self._weight("norm")

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings as the first layer gets them [..., hidden]."""
        found = embed(ids.flatten(), self._weight("embed"), self._decoder.dtype)
        if self.config.embedding_scale != 1.0:
            found = found * torch.tensor(self.config.embedding_scale, dtype=found.dtype, device=found.device)
        return found.view(*ids.shape, -1)

    def _weight(self, name: str) -> Tensor:
        weight = self._decoder.weights[name]
        assert isinstance(weight, Tensor), "a teacher's weights are floats"
        return weight


class _Observed(Decoder):
    """The decoder, with a look at the residual stream on the way."""

    def observe(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the last norm, and what enters `layers`; each [rows, hidden]."""
        backend = SideBySide(*ids.shape)
        x = embed(ids.flatten(), self.weights["embed"], self.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=x.device)
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
        angles = [turns(positions, frequencies) for frequencies in self.frequencies]
        seen: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in layers:
                seen[index] = x
            x = x + self._attention(index, layer, x, angles[layer.frequencies], backend)
            x = x + self._mlp(layer, x, backend)
        return self._norm("norm", x), [seen[index] for index in layers]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return norm(x.reshape(-1, x.shape[-1]), weight, self.config.norm_eps).view(x.shape)


class SideBySide:
    """A Backend for whole texts: a layer's keys and values live only until the next layer's."""

    def __init__(self, sequences: int, length: int) -> None:
        self._shape = (sequences, length)
        self._keys = self._values = torch.empty(0)

    @property
    def kv(self) -> KVMemory:
        raise AssertionError("a teacher has no KV memory")

    def begin(self, batch: Batch) -> None:
        raise AssertionError("a teacher reads whole texts, not batches of rows")

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        length, groups = self._shape[1], queries.shape[1] // self._keys.shape[1]
        q, k, v = (
            part.view(*self._shape, *part.shape[1:]).transpose(1, 2) for part in (queries, self._keys, self._values)
        )
        mask = _window_mask(length, window, queries.device) if 0 < window < length else None
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2).reshape(queries.shape)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)
