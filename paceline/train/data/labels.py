"""What a drafter learns from: the target's own distribution over the next token, and the loss against it.

Soft labels, not the token that came: the drafter is right as often as it agrees with the target, greedy or sampled. How
far it is from the target is measured in one of two ways: by the likelihood of what the target says, for which every
token counts that is possible; or by how much of the two distributions overlaps, which is about how often a drawn token
is right: a drafter that is too small to learn everything then leaves the unlikely ones alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from paceline.train.students.fused import against, apart, label

Aim = Literal["likelihood", "overlap"]


@dataclass(frozen=True, slots=True)
class Labels:
    wanted: Tensor  # [rows, tokens] probabilities
    entropy: Tensor  # [rows] what is left of the loss when the drafter is as good as the target
    best: Tensor  # [rows]
    aim: Aim = "likelihood"

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, head: Tensor, aim: Aim = "likelihood") -> Labels:
        """What the target says after hidden states [rows, hidden], over the tokens of `head` [tokens, hidden]."""
        return cls(*label(hidden @ head.T), aim)


class SoftLoss(torch.autograd.Function):
    """Σ weights · loss, and the best token of each row. The gradient is made on the way forward: for a large
    vocabulary the logits are most of the memory of a step, and nothing else needs them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, weights: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        loss, gradient, best = (apart if aim == "overlap" else against)(logits, wanted, weights)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return (loss * weights).sum(), best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def soft_loss(logits: Tensor, labels: Labels, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, differentiable in the logits [rows, tokens]; how far they are from the target in nats, none where they
    say the same; and the best token of each row."""
    both = SoftLoss.apply(logits, labels.wanted, weights, labels.aim)  # type: ignore[no-untyped-call]  # torch has no types
    loss, best = cast(tuple[Tensor, Tensor], both)
    left = 0.0 if labels.aim == "overlap" else (labels.entropy * weights).sum()
    return loss, (loss - left).detach(), best
