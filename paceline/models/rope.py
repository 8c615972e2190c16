"""Rotary position embeddings: which frequencies a layer turns by, and their tables.

Dimension d of a head pairs with d + head_dim / 2 ("rotate half"). Everything is float32, computed in the order the
models were trained with, so that far positions round as they did there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.config import ModelConfig, RopeScaling


def layer_rope(config: ModelConfig, layer: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of one layer: layers with a window may have their own theta, which is never scaled."""
    if config.local_rope_theta is not None and config.windows and config.windows[layer]:
        return config.local_rope_theta, None
    return config.rope_theta, config.rope_scaling


def rope_tables(
    config: ModelConfig, theta: float, scaling: RopeScaling | None, positions: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 … positions - 1, each float32 [positions, head_dim / 2]."""
    return turns(torch.arange(positions), rope_frequencies(config.head_dim, theta, scaling))


def turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions [n], each float32 [n, head_dim / 2]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position, float32 [head_dim / 2]."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rounds = scaling.original_context / (2 * math.pi / frequencies)  # full turns within the trained context
    blend = ((rounds - low) / (high - low)).clamp(0.0, 1.0)  # 0: divided, 1: kept
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
