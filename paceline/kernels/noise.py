"""Gumbel noise from a counter, in plain torch: the same bits on every machine and in kernels/cpu/pick.c.

The noise of token j is a hash of (keys, j), turned into a uniform number and that into -log(-log u). The logarithm is
made of single additions and multiplications, each of which every machine rounds alike; torch's own is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.filters import LN2_HIGH as LN2_HIGH
from paceline.sampling.filters import LN2_LOW as LN2_LOW

MASK = 0xFFFFFFFF
SQRT_HALF = 0x3F3504F3  # the bits of √½
MANTISSA = 0x7FFFFF
POLYNOMIAL = (  # (log(1 + t) - t + t²/2) / t³ for 1 + t in [√½, √2)
    0.07149753719568253,
    -0.115712009370327,
    0.11661510914564133,
    -0.12411050498485565,
    0.14249937236309052,
    -0.1666848063468933,
    0.20000708103179932,
    -0.24999989569187164,
    0.3333333134651184,
)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """float32 [n, vocab] for the 32-bit key pairs int64 [n, 2]."""
    return noise_of(keys, torch.arange(vocab, device=keys.device))


def noise_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """float32 [n, count] for the 32-bit key pairs int64 [n, 2] and some tokens of the vocabulary, int64 [count]."""
    return -_log(-_log(_uniform(keys, tokens)))


def pick(logits: Tensor, inverse_temperatures: Tensor, keys: Tensor, *, ids: Tensor | None = None) -> Tensor:
    """argmax(logits [n, vocab] * inverse_temperatures [n] + noise of keys [n, 2]) as int64 [n].

    The lowest index wins among equals. Where the logits are of some tokens only, the noise is that of their `ids`."""
    tokens = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids.long().to(logits.device)
    return (logits * inverse_temperatures[:, None] + noise_of(keys.to(logits.device), tokens)).argmax(dim=-1)


def _uniform(keys: Tensor, token: Tensor) -> Tensor:
    """float32 [n, count] in (0, 1): odd multiples of 2**-24."""
    x = (token * 0x9E3779B9 + keys[:, :1]) & MASK  # products wrap at 2**64: their low 32 bits are right
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    x = ((x ^ (x >> 16) ^ keys[:, 1:]) * 0x27D4EB2F) & MASK
    x = x ^ (x >> 15)
    return ((x >> 9).to(torch.float32) + 0.5) * 2.0**-23


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float32 numbers."""
    shifted = x.view(torch.int32) - SQRT_HALF
    exponent = (shifted >> 23).to(torch.float32)
    t = ((shifted & MANTISSA) + SQRT_HALF).view(torch.float32) - 1.0
    square = t * t
    p = torch.full_like(t, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = p * t + coefficient
    p = p * t * square + exponent * LN2_LOW - square * 0.5
    return t + p + exponent * LN2_HIGH
