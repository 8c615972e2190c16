"""The target as a teacher: whole texts in, the hidden states that a drafter learns from out. Never trained.

The teacher is the decoder that the engine runs, over sequences side by side instead of in pages:

    row b * length + i   token i of sequence b; padding comes last, where no other token attends to it

A quantised target rounds the inputs of its products to 8 bits in groups of 32 when it serves (`kernels.quant`), and its
hidden states differ accordingly. The teacher rounds the same way in float32, so that a drafter learns from the states
that it will be given.
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
from paceline.models.load import LoadedModel, load_model
from paceline.models.weights import Format
from paceline.runner.loading.memory import memory_for
from paceline.train.fused import norm, round_to_8_bits
from paceline.train.options import TargetOptions


def load_target(target: TargetOptions, device: torch.device) -> LoadedModel:
    """Load the target in the format that the drafter will be served with."""
    unquantised: Format = "bf16" if device.type == "cuda" else "fp32"
    with memory_for(f"the weights of {target.model}", "choose a smaller target"):
        return load_model(target.model, format=target.serving or unquantised, device=device)


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's hidden states over a batch of texts."""

    features: Tensor  # [sequences, length, layers * hidden] the residual stream that enters the layers asked for
    hidden: Tensor  # [sequences, length, hidden] after the last norm


class Teacher:
    def __init__(self, model: LoadedModel, *, layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """`layers`: the layers whose inputs are the features, ascending, possibly with repetitions."""
        self.config: ModelConfig = model.config
        self._layers = tuple(layers)
        self._dtype = dtype
        self._rounded = any(isinstance(weight, Quantised) for weight in model.weights.values())
        weights = {name: w if isinstance(w, Tensor) else dequantise(w) for name, w in model.weights.items()}
        inside = torch.float32 if self._rounded else dtype
        self._decoder = _FusedNormDecoder(model.config, weights, dtype=inside, device=device)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> TargetStates:
        """Compute the states of texts [sequences, length]."""
        last, kept = self.config.num_layers, list[Tensor]()
        backend = SideBySide(*ids.shape, rounded=self._rounded)
        with tensor_cores(self._rounded):
            self._decoder.forward(_rows(ids), backend, taps=[*self._layers, last], kept=kept)
        seen = {layer: rows.to(self._dtype) for layer, rows in zip(sorted({*self._layers, last}), kept, strict=True)}
        nothing = seen[last][:, :0]
        features = torch.cat([nothing, *(seen[layer] for layer in self._layers)], dim=-1)
        return TargetStates(features=features.view(*ids.shape, -1), hidden=seen[last].view(*ids.shape, -1))

    @property
    def head(self) -> Tensor:
        """Weights of the output layer [vocab, hidden]."""
        return self._weight("embed" if self.config.tied_head else "head")

    @property
    def norm(self) -> Tensor:
        """Weights of the norm before the output layer [hidden]."""
        return self._weight("norm")

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of ids [...]."""
        return self._decoder.embed(ids.flatten()).view(*ids.shape, -1).to(self._dtype)

    def _weight(self, name: str) -> Tensor:
        weight = self._decoder.weights[name]
        assert isinstance(weight, Tensor), "a teacher's weights are floats"
        return weight.to(self._dtype) if weight.dim() == 2 else weight


class _FusedNormDecoder(Decoder):
    """The decoder with a norm that is compiled on a GPU."""

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return norm(x.reshape(-1, x.shape[-1]), weight, self.config.norm_eps).view(x.shape)


def _rows(ids: Tensor) -> Batch:
    """Make a batch of whole texts; its fields about pages stay empty."""
    none = torch.empty(0, dtype=torch.int32)
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))
    return Batch(ids.flatten(), positions, slots=none, row_starts=none, bases=none, page_table=none, logit_rows=none)


class SideBySide:
    """A Backend for whole texts without a KV cache: keys and values of a layer are kept until the next layer."""

    def __init__(self, sequences: int, length: int, *, rounded: bool = False) -> None:
        self._shape = (sequences, length)
        self._rounded = rounded
        self._keys = self._values = torch.empty(0)

    @property
    def kv(self) -> KVMemory:
        raise AssertionError("a teacher has no KV memory")

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare: the shape was given at construction."""

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
        return linear(round_to_8_bits(x, GROUP) if self._rounded else x, weight, bias)


@contextmanager
def tensor_cores(wanted: bool) -> Iterator[None]:
    """Let a GPU compute float32 products with 10 bits of mantissa: more than inputs rounded to 8 bits have."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [length, length], True where a row may attend: to itself and the window - 1 rows before it."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)
