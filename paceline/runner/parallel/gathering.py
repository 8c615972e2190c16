"""What ranks have by parts, and rank 0 wants whole: logits of all tokens, and keys and values of all heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.split import Split, kv_heads, vocabulary


def all_logits(exchange: Exchange, mine: Tensor, config: ModelConfig, split: Split) -> Tensor | None:
    """Return logits [n, vocab] on rank 0, from those of each rank's tokens."""
    shapes = [(len(mine), _tokens(config, split, rank)) for rank in range(split.degree)]
    gathered = exchange.gather(mine, shapes)
    return torch.cat(gathered, dim=1) if gathered else None


def _tokens(config: ModelConfig, split: Split, rank: int) -> int:
    """Count the tokens whose outputs a rank computes."""
    return sum(len(range(*vocabulary(config, shard, split))) for shard in split.of_rank(rank))


def all_heads(exchange: Exchange, mine: Tensor, config: ModelConfig, split: Split) -> tuple[Tensor, Tensor] | None:
    """Return keys and values [layers, n, kv_heads, head_dim] on rank 0, from those [2, …] of each rank's heads."""
    gathered = exchange.gather(mine, [tuple(mine.shape)] * split.degree)
    if not gathered:
        return None
    keys, values = torch.cat(gathered, dim=3)[:, :, :, _distinct_heads(config, split)]
    return keys, values


def _distinct_heads(config: ModelConfig, split: Split) -> list[int]:
    """Return where each key/value head comes first among the heads of all shards."""
    spans = [range(*kv_heads(config, shard, split)) for shard in range(split.shards)]
    heads = [head for span in spans for head in span]
    return [heads.index(head) for head in range(config.num_kv_heads)]


def own_rows(embed: Callable[[Tensor], Tensor], tokens: Tensor, *, low: int, high: int) -> Tensor:
    """Look up embeddings of tokens [low, high), the only ones that `embed` has, from 0; zeros for other tokens."""
    inside = (tokens >= low) & (tokens < high)
    return embed((tokens - low).clamp(0, high - low - 1)) * inside[:, None]
