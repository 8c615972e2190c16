"""What every kind of drafter offers to the trainer: parameters, a loss, guesses, and the files it becomes.

Rows and steps. Row p of a text stands for its tokens up to p + 1, of which the target has computed those up to p: this
is what a drafter knows when a round begins. Its guess at step s of a chain begun at row i is about token i + 2 + s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.train.data.batches import Texts
from paceline.train.students.teacher import Insight, Teacher

ROWS = 4096  # whose logits are made at a time, where only the best of each counts


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # to be differentiated
    by_step: Tensor  # [steps] distance from the target's distribution, in nats
    agreement: Tensor  # [steps] share of rows whose best guess is the target's


class Student(Protocol):
    kind: str
    params: dict[str, Tensor]  # float32 leaves, by the names they have in the file
    constants: dict[str, Tensor]  # chosen before training, and kept with the parameters

    def losses(self, teacher: Teacher, insight: Insight, texts: Texts) -> Losses: ...

    def guesses(self, teacher: Teacher, insight: Insight, texts: Texts, steps: int) -> Tensor:
        """Tokens [sequences, length, steps]: of the chain begun at each row, as if all before had been right."""

    def files(self) -> dict[str, bytes]:
        """What `eagle:PATH`, `medusa:PATH` or `model:PATH` loads."""


def leaves(params: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies that gradients are collected in."""
    return {name: tensor.detach().clone().float().to(device).requires_grad_() for name, tensor in params.items()}


def label_rows(texts: Texts, known: Tensor, *, ahead: int = 2) -> Tensor:
    """Rows, as indices into the flattened batch, with token p + `ahead` in the answer, beyond its first token, and in
    the vocabulary `known` [vocab]. The first token of an answer is never drafted: it comes with the prompt's pass."""
    length = texts.ids.shape[1]
    at = torch.arange(length, device=texts.ids.device)
    inside = (at >= texts.starts[:, None] - 1) & (at < texts.ends[:, None] - ahead)  # [sequences, length]
    wanted = texts.ids.roll(-ahead, dims=1)
    return (inside & known[wanted]).flatten().nonzero()[:, 0]


def best_tokens(hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """The index of the largest logit of each row [rows], never all logits at once."""
    parts = [hidden[first : first + ROWS] for first in range(0, len(hidden), ROWS)]
    return torch.cat([logits(part).argmax(dim=-1) for part in parts])
