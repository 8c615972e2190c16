"""Quantised weight matrices: the one format behind 8-bit and 4-bit linear layers, and their product in plain torch.

A weight w[n, k] is `scale * q + minimum`, with q an unsigned integer and one (scale, minimum) pair either for each
output channel or for each group of 32 inputs of a channel. 8-bit weights are symmetric: their minimum is -128 * scale.
The scales and minimums of groups are numbers of fp16.

A product quantises its input to int8 with one scale for each group of 32 inputs of a row, sums exactly in integers
inside a group, and adds groups in order: a row's result never depends on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
SHRINKS = (1.0, 0.95, 0.9, 0.85)  # 4 bits: how much of a group's range to cover; outliers may be worth clipping


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [n, k] in `bits` bits, before it is packed for a kernel."""

    q: Tensor  # uint8 [n, k], values below 2**bits
    scale: Tensor  # float32 [n, groups]; groups == 1 (per channel) or k // GROUP
    minimum: Tensor  # float32 [n, groups]
    bits: int  # 4 or 8

    @property
    def grouped(self) -> bool:
        return self.scale.shape[1] > 1 or self.bits == 4

    @property
    def symmetric(self) -> bool:
        return bool((self.minimum == -(2 ** (self.bits - 1)) * self.scale).all())


def quantise(weight: Tensor, *, bits: int = 8, group: int | None = None) -> Quantised:
    """The nearest quantised matrix to weight [n, k]: by output channel (8 bits), or in groups of 32 inputs."""
    assert (bits, group) in ((8, None), (8, GROUP), (4, GROUP)), f"no kernel for {bits} bits in groups of {group}"
    assert group is None or weight.shape[1] % GROUP == 0, f"{weight.shape[1]} inputs are not a multiple of {GROUP}"
    n, k = weight.shape
    blocks = weight.float().view(n, -1, group or k)  # [n, groups, size]
    if bits == 8:
        return _symmetric(blocks, half=group is not None)
    return _best_of([_asymmetric(blocks, shrink=shrink) for shrink in SHRINKS])


def _symmetric(blocks: Tensor, *, half: bool) -> Quantised:
    scale = blocks.abs().amax(dim=-1) / 127
    if half:
        scale = scale.half().float()
    step = torch.where(scale > 0, scale, 1.0)[..., None]
    q = (blocks / step).round_().clamp_(-127, 127) + 128
    return Quantised(q=q.to(torch.uint8).flatten(1), scale=scale, minimum=-128 * scale, bits=8)


def _asymmetric(blocks: Tensor, *, shrink: float) -> tuple[Quantised, Tensor]:
    """Blocks in the 16 steps that `shrink` of their range gives, and their squared errors [n, groups]."""
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    middle, reach = (low + high) / 2, (high - low) / 2 * shrink
    minimum, scale = (middle - reach).half().float(), (reach * 2 / 15).half().float()
    step = torch.where(scale > 0, scale, 1.0)[..., None]
    q = ((blocks - minimum[..., None]) / step).round_().clamp_(0, 15)
    errors = (q * scale[..., None] + minimum[..., None] - blocks).square_().sum(dim=-1)
    return Quantised(q=q.to(torch.uint8).flatten(1), scale=scale, minimum=minimum, bits=4), errors


def _best_of(candidates: list[tuple[Quantised, Tensor]]) -> Quantised:
    """For each group the candidate with the smallest error."""
    best, least = candidates[0]
    for other, errors in candidates[1:]:
        better = errors < least
        spread = better.repeat_interleave(GROUP, dim=1)
        best = Quantised(
            q=torch.where(spread, other.q, best.q),
            scale=torch.where(better, other.scale, best.scale),
            minimum=torch.where(better, other.minimum, best.minimum),
            bits=best.bits,
        )
        least = torch.minimum(least, errors)
    return best


def dequantise(weight: Quantised) -> Tensor:
    """float32 [n, k]"""
    blocks = weight.q.view(len(weight.q), weight.scale.shape[1], -1).float()
    return (blocks * weight.scale[..., None] + weight.minimum[..., None]).flatten(1)


def quantise_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [rows, k] as integers in ±127 (float32 [rows, groups, GROUP]) and their scales [rows, groups]."""
    blocks = x.float().view(len(x), -1, GROUP)
    top = blocks.abs().amax(dim=-1)
    factor = torch.where(top > 0, 127.0 / top, 0.0)
    return (blocks * factor[..., None]).round(), top * (1.0 / 127.0)


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], as float32: what the kernels compute, in torch."""
    q, scale = quantise_inputs(x)
    w = weight.q.view(len(weight.q), -1, GROUP)  # [n, groups, GROUP]
    scales, minimums = (part.expand(-1, w.shape[1]) for part in (weight.scale, weight.minimum))
    out = torch.zeros((len(x), len(w)), device=x.device)
    for g in range(w.shape[1]):
        sums = q[:, g] @ w[:, g].float().T  # integers below 2**24, so exact in float32 in any order
        shift = scale[:, g, None] * q[:, g].sum(dim=1, keepdim=True)
        out += sums * scale[:, g, None] * scales[:, g] + shift * minimums[:, g]
    return out if bias is None else out + bias.float()
