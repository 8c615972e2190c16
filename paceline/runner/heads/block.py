"""A block drafter in plain torch, for any CPU. `models.block_config` has its formulas, `runner.heads.protocol` defines
its calls.

Reading a position costs one product for all layers, and no attention. A pass over blocks reads the context that was
read before, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Backend, Batch, Forward, KVMemory
from paceline.kernels.noise import pick
from paceline.kernels.reference import ReferenceKV, embed, linear, rms_norm, rope
from paceline.models.block_heads import BlockHead
from paceline.models.config import ModelConfig
from paceline.models.decoder import Angles, Decoder
from paceline.runner.heads.block_attention import BlockBackend
from paceline.runner.heads.convolution import around
from paceline.runner.heads.markov import MarkovRows, TorchFactors
from paceline.runner.heads.protocol import Anchor, BlockRows
from paceline.runner.heads.selector import SelectedRows


class TorchBlock:
    """Implements BlockForward, with float32 weights."""

    device: torch.device | str = "cpu"

    def __init__(self, head: BlockHead, target: Forward, *, num_pages: int) -> None:
        self.config, self.ids = head.config, head.ids
        layers = head.config.decoder
        self._target = target
        self._decoder = _BlockDecoder(head)
        self._weights = self._decoder.weights
        own = -(-head.config.block_size // PAGE_SIZE)  # pages for the rows of a block
        kv = ReferenceKV(
            layers=layers.num_layers,
            num_pages=num_pages + own,
            kv_heads=layers.num_kv_heads,
            head_dim=layers.head_dim,
        )
        self.kv: KVMemory = kv
        self._memory = kv
        scratch = num_pages * PAGE_SIZE + torch.arange(own * PAGE_SIZE)
        causal = head.config.causal or (False,) * layers.num_layers
        self._backend = BlockBackend(kv, scratch=scratch, causal=causal)
        self._context, self._bias = self._joined(layers)

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(logits, inverse_temperatures, keys, ids=self.ids)

    def probability(self, logits: Tensor, place: int) -> float:
        return float(torch.exp(logits[0, place] - torch.logsumexp(logits[0], dim=0)))

    # ── context ──

    @torch.inference_mode()
    def __call__(self, batch: Batch, *, features: Tensor) -> None:
        states = self._norm("context_norm", linear(features, self._weights["fc"], self._vector("fc.bias")))
        both = linear(states, self._context, self._bias)  # [rows, layers * 2 * kv_heads * head_dim]
        layers = self.config.decoder
        parts = both.view(len(states), layers.num_layers, 2, layers.num_kv_heads, layers.head_dim)
        angles, slots = self._decoder.angles(batch.positions), batch.slots.long()
        for index, layer in enumerate(self._decoder.layers):
            keys = self._norm(f"{layer.prefix}.k_norm", parts[:, index, 0])
            self._memory.keys[index, slots] = rope(keys, *angles[layer.frequencies])
            self._memory.values[index, slots] = parts[:, index, 1]

    def _joined(self, layers: ModelConfig) -> tuple[Tensor, Tensor | None]:
        """Join the projections to keys and values of all layers, and their biases, to one product."""
        names = [f"layers.{index}.{name}" for index in range(layers.num_layers) for name in "kv"]
        biases = [self._vector(f"{name}.bias") for name in names]
        found = [bias for bias in biases if bias is not None]
        weight = torch.cat([self._matrix(name) for name in names])
        if not found:
            return weight, None
        empty = torch.zeros(layers.num_kv_heads * layers.head_dim)
        return weight, torch.cat([empty if bias is None else bias for bias in biases])

    # ── blocks ──

    @torch.inference_mode()
    def blocks(self, anchors: Sequence[Anchor]) -> list[BlockRows]:
        first = 0 if self.config.anchor_first else 1
        rows = self.config.rows_for(max(anchor.tokens for anchor in anchors))
        states = self._states(anchors, rows).view(len(anchors), rows, -1)
        drafted = [states[i, first : first + anchor.tokens] for i, anchor in enumerate(anchors)]
        logits = torch.split(self._logits(torch.cat(drafted)), [anchor.tokens for anchor in anchors])
        return [self._rows(*pair) for pair in zip(drafted, logits, strict=True)]

    def _rows(self, states: Tensor, logits: Tensor) -> BlockRows:
        if self.config.selector is not None:
            return SelectedRows(self.config.selector, self._weights, states, logits, self.ids.long())
        factors = None if self.config.markov is None else TorchFactors(self._weights)
        return MarkovRows(self.config, self._weights, factors, states, logits, logits.argmax(1).tolist())

    def _states(self, anchors: Sequence[Anchor], rows: int) -> Tensor:
        """Compute the states [blocks * rows, hidden] after the last norm."""
        tokens = torch.full((len(anchors), rows), self.config.mask_token, dtype=torch.int32)
        tokens[:, 0] = torch.tensor([anchor.token for anchor in anchors])
        positions = torch.tensor([anchor.position for anchor in anchors])[:, None] + torch.arange(rows)
        self._backend.begin_blocks(anchors, rows)
        self._decoder.rows = rows
        angles = self._decoder.angles(positions.flatten())
        x = self._embedded(tokens.flatten()) * self.config.embedding_scale
        for index in range(self.config.decoder.num_layers):
            x = self._decoder.layer(index, x, angles, self._backend)
        return self._norm("norm", x)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if "embed" in self._weights:
            return embed(tokens, self._weights["embed"], torch.float32)
        return self._target.embed(tokens).float()

    def _logits(self, states: Tensor) -> Tensor:
        """Compute logits float32 [n, draft vocabulary], before a head corrects them."""
        own = self._weights.get("head")
        logits = self._target.project(states) if own is None else linear(states, own)
        logits = logits.float() * self.config.logit_scale
        cap = self.config.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._matrix(name), self.config.decoder.norm_eps)

    def _vector(self, name: str) -> Tensor | None:
        return self._matrix(name) if name in self._weights else None

    def _matrix(self, name: str) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return weight


class _BlockDecoder(Decoder):
    """The decoder with the convolutions of DFlash2, where there are some."""

    rows: int  # rows of each block of a pass

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head.config.decoder, head.weights)
        self._convolutions = head.config.convolutions

    def layer(self, index: int, x: Tensor, angles: Angles, backend: Backend, *, inputs: Tensor | None = None) -> Tensor:
        if self._convolutions is None:
            return super().layer(index, x, angles, backend, inputs=inputs)
        layer = self.layers[index]
        inputs, after = self._around(f"{layer.prefix}.attn_conv", self._norm(f"{layer.prefix}.attn_norm", x))
        x = x + after(self.attention(index, inputs, angles, backend))
        inputs, after = self._around(f"{layer.prefix}.mlp_conv", self._norm(f"{layer.prefix}.mlp_norm", x))
        return x + after(self.mlp(index, inputs, backend))

    def _around(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        base = self.weights[f"{name}.base"]
        assert self._convolutions is not None, "a network without convolutions"
        assert isinstance(base, Tensor), f"{name}.base is quantised"
        deltas = linear(x, self.weights[f"{name}.kernel"])
        return around(x, base, deltas, self._convolutions, rows=self.rows)
