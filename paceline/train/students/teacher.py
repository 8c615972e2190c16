"""The target as a teacher: whole texts in, features and the hidden states its head reads out. Never trained.

It is the decoder that the engine runs, over sequences that lie side by side instead of in pages:

    row b * length + i   is token i of sequence b, padded at the end, where nobody who counts looks

A target in few bits rounds the inputs of its products to 8 bits in groups of 32 when it serves (`kernels.quant`), and
its hidden states bear the marks of that. So does its teacher, in float32, or a drafter would learn from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Batch, KVMemory
from paceline.kernels.quant import GROUP, Quantised, Weight, dequantise
from paceline.kernels.reference import linear
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel
from paceline.train.data.labels import Aim
from paceline.train.students.fused import in_8_bits, norm


@dataclass(frozen=True, slots=True)
class Insight:
    """What the target thinks of a batch of texts."""

    features: Tensor  # [sequences, length, layers * hidden] the residual stream that enters the layers asked for
    hidden: Tensor  # [sequences, length, hidden] after the last norm


class Teacher:
    aim: Aim = "likelihood"  # what is learnt from it

    def __init__(self, model: LoadedModel, *, layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """`layers`: those whose inputs are the features, ascending; one may stand there more than once."""
        self.config: ModelConfig = model.config
        self._layers = tuple(layers)
        self._dtype = dtype
        self._rounded = any(isinstance(weight, Quantised) for weight in model.weights.values())
        weights = {name: w if isinstance(w, Tensor) else dequantise(w) for name, w in model.weights.items()}
        inside = torch.float32 if self._rounded else dtype
        self._decoder = _Observed(model.config, weights, dtype=inside, device=device)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Insight:
        """For texts [sequences, length]."""
        last, kept = self.config.num_layers, list[Tensor]()
        backend = SideBySide(*ids.shape, rounded=self._rounded)
        with tensor_cores(self._rounded):
            self._decoder.forward(_rows(ids), backend, taps=[*self._layers, last], kept=kept)
        seen = {layer: rows.to(self._dtype) for layer, rows in zip(sorted({*self._layers, last}), kept, strict=True)}
        nothing = seen[last][:, :0]
        features = torch.cat([nothing, *(seen[layer] for layer in self._layers)], dim=-1)
        return Insight(features=features.view(*ids.shape, -1), hidden=seen[last].view(*ids.shape, -1))

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]"""
        return self._weight("embed" if self.config.tied_head else "head")

    @property
    def norm(self) -> Tensor:
        """The weights of the norm before the head [hidden]."""
        return self._weight("norm")

    def embed(self, ids: Tensor) -> Tensor:
        """[..., hidden]"""
        return self._decoder.embed(ids.flatten()).view(*ids.shape, -1).to(self._dtype)

    def _weight(self, name: str) -> Tensor:
        weight = self._decoder.weights[name]
        assert isinstance(weight, Tensor), "a teacher's weights are floats"
        return weight.to(self._dtype) if weight.dim() == 2 else weight


class _Observed(Decoder):
    """The decoder with a norm that is compiled on a GPU."""

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return norm(x.reshape(-1, x.shape[-1]), weight, self.config.norm_eps).view(x.shape)


def _rows(ids: Tensor) -> Batch:
    """Whole texts as rows; what speaks of pages is of no use here."""
    none = torch.empty(0, dtype=torch.int32)
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))
    return Batch(ids.flatten(), positions, slots=none, row_starts=none, bases=none, page_table=none, logit_rows=none)


class SideBySide:
    """A Backend for whole texts: a layer's keys and values live only until the next layer's."""

    def __init__(self, sequences: int, length: int, *, rounded: bool = False) -> None:
        self._shape = (sequences, length)
        self._rounded = rounded
        self._keys = self._values = torch.empty(0)

    @property
    def kv(self) -> KVMemory:
        raise AssertionError("a teacher has no KV memory")

    def begin(self, batch: Batch) -> None:
        """Its shape is all there is to know."""

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
        return linear(in_8_bits(x, GROUP) if self._rounded else x, weight, bias)


@contextmanager
def tensor_cores(wanted: bool) -> Iterator[None]:
    """Products of float32 with 10 bits of mantissa on a GPU: more than inputs of 8 bits have."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)
