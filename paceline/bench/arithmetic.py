"""The multiply-adds that reading a prompt needs, and the seconds that a CPU needs for them at best.

share of the limit = seconds at best / seconds measured
seconds at best    = multiply-adds of the products / limit of 8-bit products + those of attention / limit of floats
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kernels.cpu.limits import Limits
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Multiply-adds of some work."""

    products: int  # of the linear layers
    attention: int  # scores and weighted values

    def seconds(self, limits: Limits) -> float:
        return self.products / limits.bytes + self.attention / limits.floats


def prompt_arithmetic(config: ModelConfig, length: int) -> Arithmetic:
    """Count what a prompt needs until its first token: the head computes one row, all other layers every row."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    windows = config.windows or (0,) * config.num_layers
    pairs = sum(_visible(length, window) for window in windows)
    head = config.hidden_size * config.vocab_size
    return Arithmetic(products=length * config.num_layers * layer + head, attention=2 * heads * pairs)


def _visible(length: int, window: int) -> int:
    """Count the pairs of a row and a position that it sees."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
