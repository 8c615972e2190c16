"""Soft labels, the target's own distribution over the next token, and the loss of a student against them.

The label is the whole distribution, not one token: a drafter is right as often as it agrees with the target,
greedy or sampled. The loss has one of two aims:

    likelihood   cross-entropy; every token that is possible counts
    overlap      -log Σ min(p, q); about how often a sampled token is right. A drafter too small to learn everything
                 then neglects the unlikely tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from paceline.train.fused import cross_entropy, overlap_loss, soft_labels

Aim = Literal["likelihood", "overlap"]


@dataclass(frozen=True, slots=True)
class Labels:
    wanted: Tensor  # [rows, tokens] probabilities
    entropy: Tensor  # [rows] cross-entropy of a student that equals the target
    best: Tensor  # [rows]
    aim: Aim = "likelihood"

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, head: Tensor, aim: Aim = "likelihood") -> Labels:
        """Labels for hidden states [rows, hidden] of the target, over the tokens of `head` [tokens, hidden]."""
        return cls(*soft_labels(hidden @ head.T), aim)


class SoftLoss(torch.autograd.Function):
    """Σ weights · loss, and the best token of each row. The forward pass computes the gradient too: with a large
    vocabulary the logits are most of the memory of a step, and nothing else needs them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, weights: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        loss, gradient, best = (overlap_loss if aim == "overlap" else cross_entropy)(logits, wanted, weights)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return (loss * weights).sum(), best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def soft_loss(logits: Tensor, labels: Labels, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, differentiable in the logits [rows, tokens]; its distance from the target in nats, which is 0
    if the distributions are equal; and the best token of each row."""
    both = SoftLoss.apply(logits, labels.wanted, weights, labels.aim)  # type: ignore[no-untyped-call]  # torch has no types
    loss, best = cast(tuple[Tensor, Tensor], both)
    least = 0.0 if labels.aim == "overlap" else (labels.entropy * weights).sum()
    return loss, (loss - least).detach(), best
