"""Quantised weight matrices: integers with scales, 8-bit floats, and their products in plain torch.

`Quantised` is the one format of 8-bit and 4-bit linear layers. A weight w[n, k] is `scale * q + minimum`; q is an
unsigned integer. Each output channel, or each group of 32 inputs of a channel, has one (scale, minimum) pair. 8-bit
weights are symmetric: their minimum is -128 * scale. Scales and minimums of groups are representable in fp16.
A product quantises its input to int8 with one scale for each group of 32 inputs of a row, sums exactly in integers
inside a group, and adds groups in order: a row's result never depends on other rows.

`Float8` is `scale * q`; q is e4m3 (4 bits of exponent, 3 of mantissa), and each output channel has one scale, a power
of two. Its products do not quantise their input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
SHRINKS = (1.0, 0.95, 0.9, 0.85)  # 4 bits: fractions of a group's range that are tried; clipping can lower the error
CPU_PIECE = 1 << 17  # weights quantised at a time on a CPU; few enough to stay in the cache
GPU_PIECE = 1 << 26  # weights quantised at a time on a GPU; enough to keep it busy without much memory
FLOATS_SHARE = 0.25  # share of a GPU's memory up to which quantised weights are kept in 16 bits
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest number of FP8


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [n, k] of `bits`-bit integers, not yet packed for a kernel."""

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

    def each(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """Apply `change` to every part, for example to move the matrix or to select rows of it."""
        return Quantised(change(self.q), change(self.scale), change(self.minimum), self.bits)


@dataclass(frozen=True, slots=True)
class Float8:
    """A matrix [n, k] of 8-bit floats."""

    q: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # float32 [n, 1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Float8:
        """Apply `change` to every part. It sees q as bytes, because torch has few operations for 8-bit floats."""
        return Float8(change(self.q.view(torch.uint8)).view(FP8), change(self.scale))


Weight = Tensor | Quantised | Float8


def values_of(weight: Weight) -> Tensor:
    """Return the tensor with one element for each weight: the weight itself, or the `q` of a quantised one."""
    return weight if isinstance(weight, Tensor) else weight.q


def quantise(weight: Tensor, *, bits: int = 8, group: int | None = None) -> Quantised:
    """Quantise weight [n, k] with one scale for each output channel (8 bits only), or for each group of 32 inputs."""
    assert (bits, group) in ((8, None), (8, GROUP), (4, GROUP)), f"no kernel for {bits} bits in groups of {group}"
    assert group is None or weight.shape[1] % GROUP == 0, f"{weight.shape[1]} inputs are not a multiple of {GROUP}"
    n, k = weight.shape
    rows = _rows_at_a_time(weight)
    make = _asymmetric if bits == 4 else _symmetric
    pieces = [
        make(piece.float().view(len(piece), -1, group or k), half=group is not None)
        for piece in torch.split(weight, rows)
    ]
    q, scale, minimum = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return Quantised(q=q.view(n, k), scale=scale, minimum=minimum, bits=bits)


def quantise_fp8(weight: Tensor) -> Float8:
    """Round weight [n, k] to 8-bit floats. The scale of a row is the power of two that lets its largest number fit, so
    that scaling is exact: before a sum or after it, in 16 bits or in 32."""
    pieces = [_float8(piece.float()) for piece in torch.split(weight, _rows_at_a_time(weight))]
    q, scale = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return Float8(q=q.view(FP8), scale=scale)


def _float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Convert rows [n, k] to bytes of e4m3, and return their scales [n, 1], too."""
    least = rows.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    scale = least / _step(least.frexp().mantissa)[..., 0]
    q = (rows / _step(scale)[..., 0]).clamp_(-FP8_MAX, FP8_MAX)  # larger numbers would become NaN
    return q.to(FP8).view(torch.uint8), scale


def _rows_at_a_time(weight: Tensor) -> int:
    """Return the rows of a piece. Quantisation makes many passes over a piece, so its size matters."""
    return max(1, (GPU_PIECE if weight.is_cuda else CPU_PIECE) // weight.shape[1])


def _symmetric(blocks: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise blocks [n, groups, size] to 8 bits; returns q, scale, minimum."""
    scale = blocks.abs().amax(dim=-1) / 127
    if half:
        scale = scale.half().float()
    q = (blocks / _step(scale)).round_().clamp_(-127, 127) + 128
    return q.to(torch.uint8), scale, -128 * scale


def _asymmetric(blocks: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise blocks [n, groups, size] to 4 bits, each with the shrunken range of the smallest squared error."""
    low, high = blocks.aminmax(dim=-1)
    middle, reach = (low + high) / 2, (high - low) / 2
    shrink = torch.full_like(low, SHRINKS[0])
    least = torch.full_like(low, torch.inf)
    for candidate in SHRINKS:
        q, scale, minimum = _in_16_steps(blocks, middle, reach * candidate)
        errors = q.mul_(scale[..., None]).add_(minimum[..., None]).sub_(blocks).square_().sum(dim=-1)
        shrink = torch.where(errors < least, candidate, shrink)
        least = torch.minimum(errors, least)
    q, scale, minimum = _in_16_steps(blocks, middle, reach * shrink)
    return q.to(torch.uint8), scale, minimum


def _in_16_steps(blocks: Tensor, middle: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    minimum, scale = (middle - reach).half().float(), (reach * 2 / 15).half().float()
    return ((blocks - minimum[..., None]) / _step(scale)).round_().clamp_(0, 15), scale, minimum


def _step(scale: Tensor) -> Tensor:
    """Return the divisor of each block: its scale, or 1 if the block is all zeros."""
    return torch.where(scale > 0, scale, 1.0)[..., None]


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack values below 16, uint8 [n, k], two to a byte [n, k / 2]; the first of a pair is in the low half."""
    return q[:, ::2] | q[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert `pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def dequantise(weight: Quantised | Float8) -> Tensor:
    """Convert to float32 [n, k]."""
    if isinstance(weight, Float8):
        return weight.q.float() * weight.scale
    blocks = weight.q.view(len(weight.q), weight.scale.shape[1], -1).float()
    return (blocks * weight.scale[..., None] + weight.minimum[..., None]).flatten(1)


def quantise_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise inputs [rows, k] to integers in ±127, as float32 [rows, groups, GROUP], with scales [rows, groups]."""
    blocks = x.float().view(len(x), -1, GROUP)
    top = blocks.abs().amax(dim=-1)
    factor = torch.where(top > 0, 127.0 / top, 0.0)
    return (blocks * factor[..., None]).round(), top * (1.0 / 127.0)


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """Compute x [rows, k] times weight [n, k] transposed, plus bias [n], as float32, as the kernels do."""
    q, scale = quantise_inputs(x)
    w = weight.q.view(len(weight.q), -1, GROUP)  # [n, groups, GROUP]
    scales, minimums = (part.expand(-1, w.shape[1]) for part in (weight.scale, weight.minimum))
    out = torch.zeros((len(x), len(w)), device=x.device)
    for g in range(w.shape[1]):
        sums = q[:, g] @ w[:, g].float().T  # integers below 2**24, so exact in float32 in any order
        shift = scale[:, g, None] * q[:, g].sum(dim=1, keepdim=True)
        out += sums * scale[:, g, None] * scales[:, g] + shift * minimums[:, g]
    return out if bias is None else out + bias.float()


def float8_linear(x: Tensor, weight: Float8, bias: Tensor | None = None) -> Tensor:
    """Compute x [rows, k] times weight [n, k] transposed, plus bias [n], as float32; scales apply after the sum."""
    out = x.float() @ weight.q.float().T * weight.scale[:, 0]
    return out if bias is None else out + bias.float()
