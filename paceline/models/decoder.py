"""The one decoder. Llama, Mistral, Qwen, SmolLM2 and Gemma 3 differ in the fields of their ModelConfig, not in code.

It turns a batch into hidden states and hidden states into logits. What is not plain arithmetic on rows (attention over
pages, the KV memory, products with possibly quantised weights) it leaves to a Backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Backend, Batch
from paceline.kernels.reference import embed, rms_norm, rope
from paceline.models.config import ModelConfig, RopeScaling
from paceline.models.naming import Weight
from paceline.models.rope import layer_rope, rope_frequencies, turns


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer needs beside its weights."""

    prefix: str  # of its weights' names
    window: int  # 0: none
    frequencies: int  # which of the decoder's rotary frequencies it turns by


class Decoder:
    """Weights by their canonical names (see `weights.py`), on one device; activations are of `dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.weights = {name: place(weight, dtype=dtype, device=device) for name, weight in weights.items()}
        ropes = dict.fromkeys(layer_rope(config, index) for index in range(config.num_layers))
        self.frequencies = [rope_frequencies(config.head_dim, *rope).to(device) for rope in ropes]
        self.layers = build_layers(config, list(ropes))
        self.scale = config.attention_scale or config.head_dim**-0.5

    def forward(
        self, batch: Batch, backend: Backend, *, taps: Sequence[int] = (), kept: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states [rows, hidden] before the final norm; keys and values go to the backend's KV memory, what is
        at the `taps` into `kept`."""
        backend.begin(batch)
        x = self.embed(batch.tokens)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=x.device)
        angles = [turns(batch.positions, frequencies) for frequencies in self.frequencies]
        for index, layer in enumerate(self.layers):
            if kept is not None and index in taps:
                kept.append(x)
            x = x + self._attention(index, layer, x, angles[layer.frequencies], backend)
            x = x + self._mlp(layer, x, backend)
        if kept is not None and len(self.layers) in taps:
            kept.append(self._norm("norm", x))
        return x

    def logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Float32 logits [n, vocab] for hidden states [n, hidden]."""
        head = self.weights["embed" if self.config.tied_head else "head"]
        return backend.linear(self._norm("norm", hidden), head).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weights["embed"], self.dtype)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor], backend: Backend
    ) -> Tensor:
        config, prefix = self.config, layer.prefix
        x = self._norm(f"{prefix}.attn_norm", x)
        q = self._linear(f"{prefix}.q", x, backend).view(len(x), -1, config.head_dim)
        k = self._linear(f"{prefix}.k", x, backend).view(len(x), -1, config.head_dim)
        v = self._linear(f"{prefix}.v", x, backend).view(len(x), -1, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        backend.store(index, rope(k, *angles), v)
        out = backend.attend(index, rope(q, *angles), window=layer.window, scale=self.scale)
        out = self._linear(f"{prefix}.o", out.flatten(1), backend)
        return self._norm(f"{prefix}.post_attn_norm", out) if config.post_norms else out

    def _mlp(self, layer: Layer, x: Tensor, backend: Backend) -> Tensor:
        prefix = layer.prefix
        x = self._norm(f"{prefix}.mlp_norm", x)
        gate = activate(self._linear(f"{prefix}.gate", x, backend), self.config.activation)
        out = self._linear(f"{prefix}.down", gate * self._linear(f"{prefix}.up", x, backend), backend)
        return self._norm(f"{prefix}.post_mlp_norm", out) if self.config.post_norms else out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return rms_norm(x, weight, self.config.norm_eps)

    def _linear(self, name: str, x: Tensor, backend: Backend) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, Tensor), f"{name}.bias is quantised"
        return backend.linear(x, self.weights[name], bias)


def activate(x: Tensor, activation: str) -> Tensor:
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


def build_layers(config: ModelConfig, ropes: list[tuple[float, RopeScaling | None]]) -> tuple[Layer, ...]:
    windows = config.windows or (0,) * config.num_layers
    return tuple(
        Layer(prefix=f"layers.{index}", window=window, frequencies=ropes.index(layer_rope(config, index)))
        for index, window in enumerate(windows)
    )


def place(weight: Weight, *, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Matrices in the dtype of the activations; vectors (norms and biases) stay float32; integers as they are."""
    if not isinstance(weight, Tensor):
        return weight.each(lambda part: part.to(device))
    return weight.to(device=device, dtype=dtype if weight.dim() > 1 else torch.float32)
