"""What a drafter learns from: the target's own distribution over the next token, and the loss against it.

Soft labels, not the token that came: the drafter is right as often as it agrees with the target, greedy or sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.train.fused import against, label


@dataclass(frozen=True, slots=True)
class Labels:
    wanted: Tensor  # [rows, tokens] probabilities
    entropy: Tensor  # [rows] what is left of the loss when the drafter is as good as the target
    best: Tensor  # [rows]

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, head: Tensor) -> Labels:
        """What the target says after hidden states [rows, hidden], over the tokens of `head` [tokens, hidden]."""
        return cls(*label(hidden @ head.T))


class SoftCrossEntropy(torch.autograd.Function):
    """Σ weights · cross-entropy, and the best token of each row. The gradient is made on the way forward: for a large
    vocabulary the logits are most of the memory of a step, and nothing else needs them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient, best = against(logits, wanted, weights)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return (loss * weights).sum(), best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, labels: Labels, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, differentiable in the logits [rows, tokens], and the best token of each row."""
    both = SoftCrossEntropy.apply(logits, labels.wanted, weights)  # type: ignore[no-untyped-call]  # torch has no types
    return cast(tuple[Tensor, Tensor], both)
