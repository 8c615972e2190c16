"""Element-wise arithmetic between matrix products; on a GPU torch compiles each function into one kernel.

The functions are plain; `fused` compiles one when it first sees a CUDA tensor (`TORCHDYNAMO_DISABLE=1` prevents it).
The first dimension is rows, and a new number of rows causes no new compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.reference import rope

COMPILED_DEVICES = ("cuda",)
MAX_VARIANTS = 64  # compilations of one function: with and without gradients, in several dtypes

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs compiled on a GPU and as it is elsewhere."""
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if tensors[0].device.type not in COMPILED_DEVICES:
            return function(*args, **kwargs)
        if not compiled:
            torch._dynamo.config.recompile_limit = MAX_VARIANTS
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
def round_to_8_bits(x: Tensor, group: int) -> Tensor:
    """Round rows [rows, inputs] as a quantised product rounds its inputs: a group's largest is ±127 steps."""
    blocks = x.float().view(*x.shape[:-1], -1, group)
    top = blocks.abs().amax(dim=-1, keepdim=True)
    whole = (blocks * torch.where(top > 0, 127.0 / top, 0.0)).round()
    return (whole * (top * (1.0 / 127.0))).view(x.shape).to(x.dtype)


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [rows, heads, head_dim]."""
    return rope(x, cos, sin)


@fused
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) · up, the gated activation of an MLP."""
    return functional.silu(gate) * up


@fused
def soft_labels(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, entropy and best token of each row of the target's logits [rows, tokens]."""
    log_p = logits.float().log_softmax(dim=-1)
    p = log_p.exp()
    return p.to(logits.dtype), -(p * log_p).sum(dim=-1), logits.argmax(dim=-1)


@fused
def cross_entropy(logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each row of logits against probabilities `wanted` [rows, tokens], the gradient of
    Σ weights · cross-entropy with respect to the logits, and the best token of each row."""
    z, p = logits.float(), wanted.float()
    log_sum, mass = z.logsumexp(dim=-1), p.sum(dim=-1)
    loss = log_sum * mass - (p * z).sum(dim=-1)
    gradient = ((z - log_sum[:, None]).exp() * mass[:, None] - p) * weights[:, None]
    return loss, gradient.to(logits.dtype), logits.argmax(dim=-1)


@fused
def overlap_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute -log Σ min(p, q) of each row, for p = `wanted` [rows, tokens] and q = softmax(logits); the gradient of
    Σ weights · loss with respect to the logits; and the best token of each row."""
    q, p = logits.float().softmax(dim=-1), wanted.float()
    short = torch.where(q < p, q, 0.0)  # tokens for which a larger q would overlap more
    overlap = torch.minimum(p, q).sum(dim=-1).clamp_min(1e-9)
    gradient = (q * short.sum(dim=-1, keepdim=True) - short) * (weights / overlap)[:, None]
    return -overlap.log(), gradient.to(logits.dtype), logits.argmax(dim=-1)


@fused
def attention_weights(scores: Tensor, own: Tensor, mask: Tensor) -> Tensor:
    """Softmax over scores [sequences, kv_heads, group, length, length] and scores of own keys [..., own] together."""
    return (torch.cat([scores, own], dim=-1) + mask).softmax(dim=-1)
