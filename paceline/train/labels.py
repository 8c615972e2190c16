"""What a drafter learns from: the target's own distribution over the next token, and the loss against it.

Soft labels, not the token that came: the drafter is right as often as it agrees with the target, greedy or sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 4096  # of float32 logits at a time


class SoftCrossEntropy(torch.autograd.Function):
    """Σ weights · cross-entropy(wanted, softmax(logits)) over rows. The logits are spent: their memory holds the
    gradient afterwards, which for a large vocabulary is most of the memory of a step."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros((), device=logits.device)
        for first in range(0, len(logits), ROWS):
            rows = slice(first, first + ROWS)
            z, p = logits[rows].float(), wanted[rows].float()
            z = z.log_softmax(dim=-1)
            total -= ((p * z).sum(dim=-1) * weights[rows]).sum()
            mass = p.sum(dim=-1, keepdim=True)
            logits[rows] = ((z.exp_() * mass - p) * weights[rows, None]).to(logits.dtype)
        ctx.save_for_backward(logits)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Differentiable in the logits, which must not be used afterwards."""
    loss: Tensor = SoftCrossEntropy.apply(logits, wanted, weights)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def target_probabilities(hidden: Tensor, head: Tensor) -> Tensor:
    """Of the head's tokens [rows, tokens], in the dtype of the hidden states [rows, hidden]."""
    out = torch.empty((len(hidden), len(head)), dtype=hidden.dtype, device=hidden.device)
    for first in range(0, len(hidden), ROWS):
        rows = slice(first, first + ROWS)
        out[rows] = (hidden[rows] @ head.T).float().softmax(dim=-1).to(out.dtype)
    return out


@torch.no_grad()
def entropy(probabilities: Tensor) -> Tensor:
    """Of each row [rows]: what is left of the loss when the drafter is as good as the target."""
    out = torch.empty(len(probabilities), device=probabilities.device)
    for first in range(0, len(probabilities), ROWS):
        p = probabilities[first : first + ROWS].float()
        out[first : first + ROWS] = -(p * p.clamp_min(1e-9).log()).sum(dim=-1)
    return out
