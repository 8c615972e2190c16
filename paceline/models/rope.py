"""Rotary position embeddings: the frequencies of each layer, and tables of their cosines and sines.

Dimension d of a head pairs with d + head_dim / 2 ("rotate half"). Everything is float32 and computed in the order of
operations that the models were trained with, so that large positions round as they did in training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.config import ModelConfig, RopeScaling


def layer_rope(config: ModelConfig, layer: int) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling of one layer. Layers with a window may have a theta of their own, never scaled."""
    if config.local_rope_theta is not None and config.windows and config.windows[layer]:
        return config.local_rope_theta, None
    return config.rope_theta, config.rope_scaling


def rope_tables(
    config: ModelConfig, theta: float, scaling: RopeScaling | None, positions: int
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for positions 0 … positions - 1, each float32 [positions, head_dim / 2]."""
    return turns(torch.arange(positions), rope_frequencies(config.head_dim, theta, scaling))


def turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for positions [n], each float32 [n, head_dim / 2]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Compute the angle per position, in radians, float32 [head_dim / 2]."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as Llama 3 does: slow frequencies are divided by the factor, fast ones kept, those between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rounds = scaling.original_context / (2 * math.pi / frequencies)  # full turns within the trained context
    blend = ((rounds - low) / (high - low)).clamp(0.0, 1.0)  # 0: divided, 1: kept
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
