"""Tiny random models on every backend, and a tokenizer of their size."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.kernels.base import Forward
from paceline.kernels.quant import quantise
from paceline.models.block_heads import BlockHead
from paceline.models.config import ModelConfig
from paceline.models.heads import EagleHead
from paceline.models.tensor_names import expected_shapes
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.text.tokenizer import Tokenizer
from tests.toy import ToyForward

BACKENDS = ("toy", "compiled", "eager")
ON_GPU = "PACELINE_GPU" in os.environ
VOCAB = 97
CONTEXT = 160
MOST_SEATS = 32  # sequences of an engine under test


@dataclass(frozen=True)
class Model:
    """A tiny random model. With `noise`, the model of the same seed with that much of its weights replaced."""

    seed: int = 0
    noise: float = 0.0
    vocab_size: int = VOCAB
    sharpness: float = 3.0  # of the toy's distributions
    window: int = 0  # of the first layer's attention, where it is a real model

    def forward(self, backend: str, *, num_pages: int, taps: Sequence[int] = ()) -> Forward:
        if backend == "toy":
            return ToyForward(
                num_pages=num_pages,
                seed=self.seed,
                noise=self.noise,
                vocab_size=self.vocab_size,
                sharpness=self.sharpness,
                taps=taps,
            )
        if backend == "eager":
            return TorchForward(self.config, self.weights, num_pages=num_pages, taps=taps)
        if backend == "cuda":
            return cuda_forward(self, num_pages=num_pages, taps=taps)
        quantised = {name: quantise(w) if w.dim() == 2 else w for name, w in self.weights.items()}
        return CompiledForward(self.config, quantised, num_pages=num_pages, threads=1, taps=taps)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="llama",
            vocab_size=self.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_context=1024,
            norm_eps=1e-5,
            rope_theta=1e4,
            windows=(self.window, 0) if self.window else (),
        )

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        own, other = (random_weights(self.config, seed) for seed in (self.seed, self.seed + 1000))
        return {name: weight + self.noise * other[name] for name, weight in own.items()}


def cuda_forward(model: Model, *, num_pages: int, kv: Any = None, taps: Sequence[int] = ()) -> Forward:
    """The kernels for GPUs: on one, or by Triton's interpreter."""
    from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv

    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    decoder = CudaDecoder(
        model.config, dict(model.weights), max_context=CONTEXT + 32, dtype=dtype, device=device, pdl=ON_GPU
    )
    kv = kv or new_kv(model.config, num_pages=num_pages, dtype=dtype, device=device)
    return CudaForward(decoder, kv, taps=taps)


def cuda_leading(target: Any, layers: int) -> Forward:
    """The first layers of a target of `cuda_forward`, on its KV memory."""
    from paceline.runner.forwards.cuda import CudaForward

    return CudaForward(target.decoder.leading(layers), target.kv)


def cuda_head(head: EagleHead, target: Any) -> Any:
    """A head on the kernels for GPUs, beside a target of `cuda_forward`."""
    from paceline.runner.heads.cuda import CudaHead

    made = CudaHead(replace(head, weights=dict(head.weights)), target.decoder, max_context=CONTEXT + 32)
    made.new_kv(target.kv.num_pages)
    return made


def cuda_block(head: BlockHead, target: Any) -> Any:
    """A block drafter on the kernels for GPUs, beside a target of `cuda_forward`."""
    from paceline.runner.heads.cuda_block import CudaBlock

    made = CudaBlock(replace(head, weights=dict(head.weights)), target.decoder, max_context=CONTEXT + 32)
    made.new_kv(target.kv.num_pages, seats=MOST_SEATS)
    return made


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}
    scales = {"embed": 0.3, "head": 0.3}  # larger than the layers: greedy text falls into loops now and then
    return {
        name: 1 + 0.1 * weight if weight.dim() == 1 else scales.get(name, 0.13) * weight
        for name, weight in drawn.items()
    }


TARGET = Model()


def tiny_vocabulary() -> dict[str, Any]:
    """Letters, pairs of letters, two halves of an é, and one control token (id 0): a stop string may begin anywhere."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pairs = [(a, b) for a in "aeiou" for b in letters][: VOCAB - 30]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<eos>", *letters, "Ġ", "Ã", "©", *(a + b for a, b in pairs)],
        "token_type": [3] + [1] * (VOCAB - 1),
        "merges": [f"{a} {b}" for a, b in pairs],
        "eos_token_id": 0,
    }


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in tiny_vocabulary().items()})


NOISY = Model(noise=0.05)
BAD = Model(seed=5)
