"""The one decoder of all architectures: they differ in the fields of their ModelConfig, not in code.

It computes hidden states from a batch and logits from hidden states. A Backend does everything beyond arithmetic on
rows: attention over pages, the KV memory, and products with weights that may be quantised.
`runner/forwards/compiled.py` and `runner/forwards/cuda.py` express the same decoder with their kernels;
docs/architecture.md lists which operation is where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Backend, Batch
from paceline.kernels.reference import embed, rms_norm, rope
from paceline.models.config import ModelConfig, RopeScaling
from paceline.models.rope import layer_rope, rope_frequencies, turns
from paceline.models.tensor_names import Weight

Angles = Sequence[tuple[Tensor, Tensor]]  # cosines and sines [rows, head_dim / 2] of the rotations, by kind of layer


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's settings beside its weights."""

    prefix: str  # first part of the names of its weights
    window: int  # positions; 0: none
    frequencies: int  # index into the decoder's list of rotary frequencies


class Decoder:
    """A decoder with its weights, by canonical name (see `weights.py`), on one device; activations have `dtype`."""

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

    def leading(self, layers: int) -> Decoder:
        """Return the decoder of the first layers, which shares all weights."""
        part = copy(self)
        part.config, part.layers = self.config.leading(layers), self.layers[:layers]
        return part

    def forward(
        self, batch: Batch, backend: Backend, *, taps: Sequence[int] = (), kept: list[Tensor] | None = None
    ) -> Tensor:
        """Compute hidden states [rows, hidden] before the final norm.

        Keys and values go to the backend's KV memory; the states at the `taps` are appended to `kept`."""
        backend.begin(batch)
        angles = self.angles(batch.positions)
        layers = [partial(self.layer, index, angles=angles, backend=backend) for index in range(len(self.layers))]
        x = scaled(self.embed(batch.tokens), self.config.embedding_scale)
        return run_layers(x, layers, states=self.states, taps=taps, kept=kept)

    def layer(self, index: int, x: Tensor, angles: Angles, backend: Backend, *, inputs: Tensor | None = None) -> Tensor:
        """Compute the output of a layer from x [rows, hidden]. Attention reads `inputs`, or the norm of x."""
        inputs = self.attention_inputs(index, x) if inputs is None else inputs
        x = x + self.after_attention(index, self.attention(index, inputs, angles, backend))
        return x + self.after_mlp(index, self.mlp(index, self.mlp_inputs(index, x), backend))

    def attention_inputs(self, index: int, x: Tensor) -> Tensor:
        return self._norm(f"{self.layers[index].prefix}.attn_norm", x)

    def mlp_inputs(self, index: int, x: Tensor) -> Tensor:
        return self._norm(f"{self.layers[index].prefix}.mlp_norm", x)

    def after_attention(self, index: int, out: Tensor) -> Tensor:
        """Return what attention adds to the residual stream, from its output."""
        return self._norm(f"{self.layers[index].prefix}.post_attn_norm", out) if self.config.post_norms else out

    def after_mlp(self, index: int, out: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, from its output."""
        return self._norm(f"{self.layers[index].prefix}.post_mlp_norm", out) if self.config.post_norms else out

    def angles(self, positions: Tensor) -> Angles:
        """Return cosines and sines of the rotations at positions [rows], for each kind of layer."""
        return [turns(positions, frequencies) for frequencies in self.frequencies]

    def states(self, hidden: Tensor) -> Tensor:
        """Compute the states [n, hidden] after the last norm from hidden states [n, hidden]."""
        return self._norm("norm", hidden)

    def logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Compute float32 logits [n, vocab] from hidden states [n, hidden]."""
        return self.project(self.states(hidden), backend)

    def project(self, states: Tensor, backend: Backend) -> Tensor:
        """Compute float32 logits [n, vocab] from states [n, hidden] after the last norm."""
        return backend.linear(states, self.weights["embed" if self.config.tied_head else "head"]).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weights["embed"], self.dtype)

    def attention(self, index: int, x: Tensor, angles: Angles, backend: Backend) -> Tensor:
        """Compute the output of a layer's attention from its inputs x [rows, hidden], and store keys and values."""
        config, layer = self.config, self.layers[index]
        prefix, turned = layer.prefix, angles[layer.frequencies]
        q, k, v = (self._linear(f"{prefix}.{name}", x, backend).view(len(x), -1, config.head_dim) for name in "qkv")
        if config.qk_norm:
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        backend.store(index, rope(k, *turned), v)
        out = backend.attend(index, rope(q, *turned), window=layer.window, scale=self.scale)
        return self._linear(f"{prefix}.o", out.flatten(1), backend)

    def mlp(self, index: int, x: Tensor, backend: Backend) -> Tensor:
        """Compute the output of a layer's MLP from its inputs x [rows, hidden]."""
        prefix = self.layers[index].prefix
        gate = activate(self._linear(f"{prefix}.gate", x, backend), self.config.activation)
        return self._linear(f"{prefix}.down", gate * self._linear(f"{prefix}.up", x, backend), backend)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return rms_norm(x, weight, self.config.norm_eps)

    def _linear(self, name: str, x: Tensor, backend: Backend) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, Tensor), f"{name}.bias is quantised"
        return backend.linear(x, self.weights[name], bias)


def run_layers(
    x: Tensor,
    layers: Sequence[Callable[[Tensor], Tensor]],
    *,
    states: Callable[[Tensor], Tensor],
    taps: Sequence[int] = (),
    kept: list[Tensor] | None = None,
) -> Tensor:
    """Send the residual stream x [rows, hidden] through all layers, and append the states at the `taps` to `kept`.

    `states`: the last norm."""
    for index, layer in enumerate(layers):
        if kept is not None and index in taps:
            kept.append(x)
        x = layer(x)
    if kept is not None and len(layers) in taps:
        kept.append(states(x))
    if kept is not None and len(layers) + 1 in taps:
        kept.append(x)
    return x


def scaled(embedded: Tensor, scale: float) -> Tensor:
    """Multiply embeddings by the model's scale, rounded to their type."""
    return embedded if scale == 1.0 else embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)


def activate(x: Tensor, activation: str) -> Tensor:
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


def build_layers(config: ModelConfig, ropes: list[tuple[float, RopeScaling | None]]) -> tuple[LayerSpec, ...]:
    windows = config.windows or (0,) * config.num_layers
    return tuple(
        LayerSpec(prefix=f"layers.{index}", window=window, frequencies=ropes.index(layer_rope(config, index)))
        for index, window in enumerate(windows)
    )


def place(weight: Weight, *, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Move a weight to `device`: a matrix as `dtype`, a vector (norm or bias) as float32, a quantised one unchanged."""
    if not isinstance(weight, Tensor):
        return weight.each(lambda part: part.to(device))
    return weight.to(device=device, dtype=dtype if weight.dim() > 1 else torch.float32)
