"""Arithmetic between products that would pass over memory many times: on a GPU each of these becomes one kernel.

They are plain functions, compiled by torch when they first meet a CUDA tensor (`TORCHDYNAMO_DISABLE=1` leaves them as
they are). Rows come first, [rows, ...], and may be as many as they like without being compiled again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.reference import rope

COMPILED = ("cuda",)  # devices
VARIANTS = 64  # of one function: with and without gradients, in several types

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if tensors[0].device.type not in COMPILED:
            return function(*args, **kwargs)
        if not compiled:
            torch._dynamo.config.recompile_limit = VARIANTS
            compiled.append(torch.compile(function))
        for tensor in tensors:
            if tensor.dim() and len(tensor) == len(tensors[0]):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        result: R = compiled[0](*args, **kwargs)
        return result

    return run


@fused
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


@fused
def in_8_bits(x: Tensor, group: int) -> Tensor:
    """Rows [rows, inputs] as a product in few bits sees them: rounded to ±127 of the largest of each group."""
    blocks = x.float().view(*x.shape[:-1], -1, group)
    top = blocks.abs().amax(dim=-1, keepdim=True)
    whole = (blocks * torch.where(top > 0, 127.0 / top, 0.0)).round()
    return (whole * (top * (1.0 / 127.0))).view(x.shape).to(x.dtype)


@fused
def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [rows, heads, head_dim]."""
    return rope(x, cos, sin)


@fused
def gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


@fused
def label(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the target's logits [rows, tokens]: probabilities in their dtype, the entropy and the best of each row."""
    log_p = logits.float().log_softmax(dim=-1)
    p = log_p.exp()
    return p.to(logits.dtype), -(p * log_p).sum(dim=-1), logits.argmax(dim=-1)


@fused
def against(logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each row of logits against `wanted` [rows, tokens], the gradient of Σ weights · cross-entropy,
    and the best token of each row."""
    z, p = logits.float(), wanted.float()
    log_sum, mass = z.logsumexp(dim=-1), p.sum(dim=-1)
    loss = log_sum * mass - (p * z).sum(dim=-1)
    gradient = ((z - log_sum[:, None]).exp() * mass[:, None] - p) * weights[:, None]
    return loss, gradient.to(logits.dtype), logits.argmax(dim=-1)


@fused
def apart(logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the negative logarithm of the overlap, Σ min(p, q) over tokens."""
    q, p = logits.float().softmax(dim=-1), wanted.float()
    short = torch.where(q < p, q, 0.0)  # where more of q would overlap more
    overlap = torch.minimum(p, q).sum(dim=-1).clamp_min(1e-9)
    gradient = (q * short.sum(dim=-1, keepdim=True) - short) * (weights / overlap)[:, None]
    return -overlap.log(), gradient.to(logits.dtype), logits.argmax(dim=-1)


@fused
def shares(scores: Tensor, own: Tensor, mask: Tensor) -> Tensor:
    """Softmax over scores [sequences, kv_heads, group, length, length] and own ones [..., own] together."""
    return (torch.cat([scores, own], dim=-1) + mask).softmax(dim=-1)
