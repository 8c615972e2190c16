"""The interface between a student and the trainer: parameters, a loss, guesses, and the files it is written as.

Rows and steps. Row p of a text covers its tokens up to p + 1, of which the target has computed those up to p. That
is what a drafter knows when a round starts. The guess at step s of a chain that starts at row i is about token
i + 2 + s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.students.labels import Aim

LOGIT_ROWS = 4096  # rows whose logits are computed at a time, where only the best token of each is needed


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # the sum to be differentiated
    by_step: Tensor  # [steps] distance from the target's distribution, in nats
    agreement: Tensor  # [steps] share of rows whose best guess is the target's


class Student(Protocol):
    kind: str
    params: dict[str, Tensor]  # float32 leaves, by their names in the file
    constants: dict[str, Tensor]  # chosen before training and kept with the parameters

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses: ...

    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        """Return the tokens [sequences, length, steps] of the chain that starts at each row, given that earlier guesses
        of the chain are right."""

    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Compute what the files need beyond the trained parameters; called once, when training has ended."""

    def files(self) -> dict[str, bytes]:
        """Return the files that `eagle:PATH`, `block:PATH`, `mtp:PATH`, `medusa:PATH` or `model:PATH` loads."""


def leaves(params: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy parameters to float32 tensors that collect gradients."""
    return {name: tensor.detach().clone().float().to(device).requires_grad_() for name, tensor in params.items()}


def label_rows(texts: TextBatch, known: Tensor, *, ahead: int = 2) -> Tensor:
    """Find the rows p to learn from, as indices into the flattened batch: token p + `ahead` must be in the answer,
    beyond its first token, and in the vocabulary `known` [vocab]. The first token of an answer is never drafted: the
    pass over the prompt yields it."""
    length = texts.ids.shape[1]
    at = torch.arange(length, device=texts.ids.device)
    inside = (at >= texts.starts[:, None] - 1) & (at < texts.ends[:, None] - ahead)  # [sequences, length]
    wanted = texts.ids.roll(-ahead, dims=1)
    return (inside & known[wanted]).flatten().nonzero()[:, 0]


def best_tokens(hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Find the index of the largest logit of each row [rows], without holding all logits at once."""
    parts = [hidden[first : first + LOGIT_ROWS] for first in range(0, len(hidden), LOGIT_ROWS)]
    return torch.cat([logits(part).argmax(dim=-1) for part in parts])
