"""Small random models for the compiled forward, the same arithmetic in torch, and batches to run them on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cpu.build import runnable_variants
from paceline.kernels.quant import GROUP, Quantised, dequantise, quantise, quantised_linear
from paceline.kernels.reference import ReferenceBackend, ReferenceKV
from paceline.models.config import ModelConfig, RopeScaling
from paceline.models.decoder import Decoder
from paceline.models.tensor_names import expected_shapes
from paceline.runner.forwards.compiled import CompiledForward

CHUNK = 128  # keys whose softmax the kernels compute at once
RUNNABLE = runnable_variants()  # widest first
if held_to := os.environ.get("PACELINE_CPU_VARIANT"):  # as tests.held_to sets it: nothing wider runs
    RUNNABLE = RUNNABLE[RUNNABLE.index(held_to) :]
PLAIN = ModelConfig(
    architecture="llama",
    vocab_size=90,  # no multiple of a tile
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_context=512,
    norm_eps=1e-5,
    rope_theta=1000.0,
)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_context=64)
CONFIGS = {
    "plain": PLAIN,
    "many-heads": replace(PLAIN, num_heads=6, num_kv_heads=1, head_dim=16),
    "wide-heads": replace(PLAIN, num_heads=2, num_kv_heads=1, head_dim=208),
    "tied": replace(PLAIN, tied_head=True, embedding_scale=3.0),
    "rope": replace(PLAIN, rope_scaling=LLAMA3, attention_scale=0.3),
    "bias": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk-norm": replace(PLAIN, qk_norm=True),
    "gelu": replace(PLAIN, activation="gelu_tanh"),
    "window": replace(PLAIN, windows=(7,)),
    "long-window": replace(PLAIN, windows=(131,), local_rope_theta=50.0),
    "post-norms": replace(PLAIN, post_norms=True),
    "two-layers": replace(PLAIN, num_layers=2),
    "long-rows": replace(PLAIN, hidden_size=800, intermediate_size=864),  # more groups than are quantised at once
    "everything": replace(
        PLAIN,
        num_layers=2,
        qkv_bias=True,
        qk_norm=True,
        post_norms=True,
        activation="gelu_tanh",
        windows=(70, 0),
        local_rope_theta=50.0,
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
        tied_head=True,
        embedding_scale=8.0,
    ),
}
FORMATS = {"int8": (8, None), "group8": (8, GROUP), "int4": (4, GROUP)}


def random_weights(config: ModelConfig, format: str = "int4", *, seed: int = 0) -> dict[str, Tensor | Quantised]:
    """`format` one of FORMATS, or "mixed": each matrix in another."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor | Quantised] = {}
    for index, (name, shape) in enumerate(expected_shapes(config).items()):
        values = torch.randn(shape, generator=generator)
        kinds = list(FORMATS.values()) if format == "mixed" else [FORMATS[format]]
        bits, group = kinds[index % len(kinds)]
        weights[name] = values * 0.3 + 1 if len(shape) == 1 else quantise(values * 0.2, bits=bits, group=group)
    return weights


def floats(weights: Mapping[str, Tensor | Quantised]) -> dict[str, Tensor]:
    return {name: weight if isinstance(weight, Tensor) else dequantise(weight) for name, weight in weights.items()}


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounded_softmax(scores: Tensor) -> Tensor:
    """Softmax whose weights are rounded to bf16 in chunks of 128, each against its own maximum."""
    chunks = functional.pad(scores, (0, -scores.shape[-1] % CHUNK), value=-torch.inf).unflatten(-1, (-1, CHUNK))
    tops = chunks.amax(-1, keepdim=True)
    weights = to_bf16((chunks - tops).exp().nan_to_num(0.0)) * (tops - tops.amax(-2, keepdim=True)).exp()
    return (weights / weights.sum((-1, -2), keepdim=True)).flatten(-2)[..., : scores.shape[-1]]


class QuantisedBackend(ReferenceBackend):
    """The reference with the products and the attention of the kernels."""

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        keys, values = self.kv.keys[layer].float(), self.kv.values[layer].float()
        out = torch.empty_like(queries)
        for view in self._views:
            hidden = (view.distance < 0) | (view.distance >= (window or 1 << 30))
            q = to_bf16(queries[view.rows] * scale).unflatten(1, (keys.shape[1], -1))
            scores = torch.einsum("rhgd,shd->rhgs", q, keys[view.shared]).masked_fill(hidden[:, None, None], -torch.inf)
            weights = rounded_softmax(scores)
            out[view.rows] = torch.einsum("rhgs,shd->rhgd", weights, values[view.shared]).flatten(1, 2)
        return out

    def linear(self, x: Tensor, weight: Tensor | Quantised, bias: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Quantised)
        return quantised_linear(x, weight, bias)


class Oracle:
    """What CompiledForward computes, in torch: bf16 KV memory, quantised products."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor | Quantised], *, num_pages: int) -> None:
        self.decoder = Decoder(config, weights)
        self.kv = ReferenceKV(
            layers=config.num_layers,
            num_pages=num_pages,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
        )
        self.backend = QuantisedBackend(self.kv)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        hidden = self.decoder.forward(batch, self.backend)
        return self.decoder.logits(hidden[batch.logit_rows.long()], self.backend)


def compiled(config: ModelConfig, format: str = "int4", *, num_pages: int, **options: Any) -> CompiledForward:
    return CompiledForward(config, random_weights(config, format), num_pages=num_pages, **options)


def ints(values: Sequence[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def rows_of(*works: tuple[Sequence[int], int, int, Sequence[int]]) -> Batch:
    """A pass over positions [start, stop) of sequences given as (tokens, start, stop, pages); logits of every row."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, bases = [0], []
    width = max(len(pages) for _, _, _, pages in works)
    for all_tokens, start, stop, pages in works:
        tokens += all_tokens[start:stop]
        positions += range(start, stop)
        slots += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, stop)]
        starts.append(len(tokens))
        bases.append(stop)
    table = [list(pages) + [-1] * (width - len(pages)) for _, _, _, pages in works]
    return Batch(
        tokens=ints(tokens),
        positions=ints(positions),
        slots=ints(slots),
        row_starts=ints(starts),
        bases=ints(bases),
        page_table=torch.tensor(table, dtype=torch.int32),
        logit_rows=ints(range(len(tokens))),
    )
