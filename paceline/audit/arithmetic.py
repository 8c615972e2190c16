"""The bound of a near-tie: how far rounding alone can move the gap between two logits.

In a *bitwise* configuration a row's logits do not depend on the other rows, so the bound is 0. Elsewhere rounding is
treated as noise. Activations are rounded to their type at PLACES places per layer, and each product adds up to `width`
terms in float32. The errors are independent, so their squares add up:

    one place    e = √(u² + width · u₃₂²)              u = 2⁻⁸/√12 for bf16, u₃₂ = 2⁻²⁴/√3 for fp32
    one pass     r = e · √(PLACES · layers)            relative to the last hidden state
    a logit      r · spread                            spread: standard deviation of the logits over the vocabulary
    a gap        SIGMAS · 2 · r · spread               two logits, each from two passes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.engine.assemble import Parts

PLACES = 10  # roundings per layer: norm, q·k·v, rotation, attention, o, sum; norm, gate·up, product, down with its sum
SIGMAS = 4.0  # standard deviations of the noise within the bound
UNIT_FP32 = 2.0**-24 / math.sqrt(3)  # root mean square of a relative rounding error


@dataclass(frozen=True, slots=True)
class Arithmetic:
    bitwise: bool
    unit: float = 0.0  # root mean square of the relative rounding error of activations
    layers: int = 0
    width: int = 0  # terms of the longest inner product
    name: str = "bitwise"

    @classmethod
    def of(cls, parts: Parts) -> Arithmetic:
        """The arithmetic of a loaded target."""
        if parts.bitwise:
            return cls(bitwise=True)
        config, embed = parts.target.model.config, parts.target.model.weights["embed"]
        dtype = embed.dtype if isinstance(embed, Tensor) else torch.float32
        return cls.rounded(dtype, layers=config.num_layers, width=max(config.hidden_size, config.intermediate_size))

    @classmethod
    def rounded(cls, dtype: torch.dtype, *, layers: int, width: int) -> Arithmetic:
        unit = torch.finfo(dtype).eps / 2 / math.sqrt(3)
        return cls(bitwise=False, unit=unit, layers=layers, width=width, name=str(dtype).removeprefix("torch."))

    def bound(self, logits: Tensor) -> float:
        """Largest gap between two of these logits [vocab] that is a near-tie."""
        if self.bitwise:
            return 0.0
        place = math.hypot(self.unit, UNIT_FP32 * math.sqrt(self.width))
        return SIGMAS * 2 * place * math.sqrt(PLACES * self.layers) * float(logits.std())

    @property
    def rule(self) -> str:
        """The bound in words."""
        if self.bitwise:
            return "bitwise: a row's logits are the same bits whatever rides along, so every difference is structural"
        place = math.hypot(self.unit, UNIT_FP32 * math.sqrt(self.width))
        share = SIGMAS * 2 * place * math.sqrt(PLACES * self.layers)
        return (
            f"{self.name}: a gap of up to {share:.2g} standard deviations of the logits is a near-tie "
            f"({SIGMAS:g} sigma of rounding at {PLACES} places in each of {self.layers} layers, twice two passes)"
        )
