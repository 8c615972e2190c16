"""Split models for tests: a tiny model as files, ranks that are threads of this process, and ranks that are processes.

Ranks as threads run the same code as processes do, but for the pipe and gloo: queues carry the tensors.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.drafters.model import make_drafter
from paceline.drafters.recipe import BuildContext
from paceline.kernels.quant import Weight
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.models.tensor_names import HF_PARTS, HF_TOP
from paceline.runner.parallel.exchange import Exchange, Work
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.parallel.sharded_decoder import ShardedDecoder
from paceline.runner.parallel.split import Split, piece_of, plan_split
from tests.rig_drafters import Made
from tests.tiny_models import TARGET

T = TypeVar("T")
PAGES = 8
PATIENCE = 100.0  # seconds: a guard against hanging, not a promise of speed
HF_NAMES = {canonical: name for name, canonical in HF_TOP.items()}
HF_LAYER_NAMES = {canonical: name for name, canonical in HF_PARTS.items()}


VARIANTS: Mapping[str, ModelConfig] = {  # all the ways in which architectures differ
    "llama": TARGET.config,
    "tied": replace(TARGET.config, tied_head=True, vocab_size=96),
    "biases": replace(TARGET.config, qkv_bias=True, output_bias=True, mlp_bias=True),
    "gemma": replace(
        TARGET.config,
        num_layers=3,
        qk_norm=True,
        post_norms=True,
        windows=(6, 0, 6),
        local_rope_theta=50.0,
        attention_scale=0.2,
        activation="gelu_tanh",
        embedding_scale=8.0,
    ),
}


def cut(weights: Mapping[str, Tensor], config: ModelConfig, shard: int, split: Split) -> dict[str, Weight]:
    """The part of each weight that a shard has."""
    parts: dict[str, Weight] = {}
    for name, weight in weights.items():
        piece = piece_of(name, config, shard, split)
        dim = 0 if piece is None or piece.axis == "rows" else 1
        parts[name] = weight if piece is None else weight.narrow(dim, piece.start, piece.size).contiguous()
    return parts


def write_tiny(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> Path:
    """Save a tiny llama as a Hugging Face directory without a tokenizer."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({_hf_name(name): weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    return path


def _hf_name(canonical: str) -> str:
    if canonical in HF_NAMES:
        return HF_NAMES[canonical]
    _, layer, part, *bias = canonical.split(".")
    return f"model.layers.{layer}.{HF_LAYER_NAMES[part]}.{'bias' if bias else 'weight'}"


def split_over(
    ranks: Ranks, path: Path, *, same_bits: bool, num_pages: int, taps: Sequence[int] = (), format: Any = "fp32"
) -> SplitForward:
    """`format` of integers: compiled."""
    config, compiled = open_model(str(path)).config, format.startswith("int")
    split = plan_split("tiny", config, degree=ranks.size, same_bits=same_bits, packed=compiled)
    dtype = torch.bfloat16 if format == "bf16" else torch.float32
    return SplitForward(ranks, str(path), split=split, format=format, dtype=dtype, num_pages=num_pages, taps=taps)


def split_drafter(path: Path, *, same_bits: bool = False, format: str = "fp32", mask: int | None = None) -> Made:
    """A model that drafts on the ranks of the target."""

    def make(context: BuildContext, backend: str) -> Drafter:
        ranks, pages = context.ranks, context.pool.num_pages
        assert ranks is not None, "the target is split"
        forward = split_over(ranks, path, same_bits=same_bits, num_pages=pages, format=format)
        return make_drafter(forward, context, min_confidence=0.0, mask=mask)

    return make


class Sent:
    """A message of `ThreadGroup`."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def wait(self) -> bool:
        self._done()
        return True


class ThreadGroup:
    """Implements Group among threads of this process, and counts the messages."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self._rank, self._queues = rank, queues
        self.sent = 0

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        self.sent += 1
        self._queues[self._rank, rank].put(tensors[0].clone())
        return Sent(lambda: None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        def take() -> None:
            tensors[0].copy_(self._queues[rank, self._rank].get(timeout=PATIENCE))

        return Sent(take)


@dataclass
class Threads:
    """The ranks of one group, each a thread."""

    groups: list[ThreadGroup]
    exchanges: list[Exchange]

    @classmethod
    def of(cls, size: int) -> Threads:
        queues: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (one, other): queue.Queue() for one in range(size) for other in range(size)
        }
        groups = [ThreadGroup(rank, queues) for rank in range(size)]
        return cls(groups, [Exchange(group, rank=rank, size=size) for rank, group in enumerate(groups)])

    def each(self, work: Callable[[int, Exchange], T]) -> list[T]:
        """Run `work` on every rank at once, and return what each returns."""
        with ThreadPoolExecutor(len(self.exchanges), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, range(len(self.exchanges)), self.exchanges))

    def build(
        self, config: ModelConfig, weights: Mapping[str, Tensor], *, same_bits: bool, taps: Sequence[int] = ()
    ) -> list[ShardedDecoder]:
        """Split a model that is in memory."""
        split = plan_split("tiny", config, degree=len(self.exchanges), same_bits=same_bits)

        def part(rank: int, exchange: Exchange) -> ShardedDecoder:
            read = partial(cut, weights, config, split=split)
            return ShardedDecoder(config, split, exchange, read, num_pages=PAGES, dtype=torch.float32, taps=taps)

        return self.each(part)
