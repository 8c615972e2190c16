"""Tokens per round as the engine would count them, from a drafter's guesses over the target's own greedy answers.

Greedy acceptance keeps a drafted token exactly when it is the answer's, so rounds can be replayed over an answer that
is already there: no engine, all rows of all answers at once, and the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import Texts, in_order
from paceline.train.students.student import Student
from paceline.train.students.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Score:
    """Of a set of prompts, with drafts of `draft` tokens."""

    draft: int
    rounds: int
    accepted: tuple[int, ...]  # by position in the draft

    @property
    def tokens_per_round(self) -> float:
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """How often a token at each position was accepted, given that those before it were."""
        before = (self.rounds, *self.accepted)
        return tuple(now / max(1, then) for now, then in zip(self.accepted, before, strict=False))


def evaluate(
    student: Student, teacher: Teacher, exchanges: Sequence[Exchange], *, draft: int, tokens: int, device: torch.device
) -> Score:
    rounds, accepted = 0, np.zeros(draft, dtype=np.int64)
    for texts in in_order(exchanges, tokens=tokens):
        there = texts.to(device)
        found = student.guesses(teacher, teacher(there.ids), there, draft)
        for reach, start, end in zip(reaches(found, there), texts.starts.tolist(), texts.ends.tolist(), strict=True):
            lengths = replay(reach, start=start, end=end)
            rounds += len(lengths)
            accepted += (lengths[:, None] > np.arange(draft)).sum(axis=0)
    return Score(draft=draft, rounds=rounds, accepted=tuple(accepted.tolist()))


@torch.no_grad()
def closeness(
    student: Student, teacher: Teacher, exchanges: Sequence[Exchange], *, tokens: int, device: torch.device
) -> float:
    """From 0 to 1: how close the drafter comes to the target by the distance that is learnt from. Where that is how
    little they overlap, it is the mean share (geometric) of their distributions that does."""
    far, answered = 0.0, 0
    for texts in in_order(exchanges, tokens=tokens):
        there, weight = texts.to(device), int((texts.ends - texts.starts).sum())
        far += weight * student.losses(teacher, teacher(there.ids), there).by_step.mean().item()
        answered += weight
    return math.exp(-far / max(1, answered))


def reaches(guesses: Tensor, texts: Texts) -> np.ndarray:
    """How many guesses of the chain begun at each row are right [sequences, length]."""
    right = [
        guesses[..., step] == texts.ids.roll(-2 - step, dims=1) for step in range(guesses.shape[-1])
    ]  # what rolls around lies beyond the end, where `replay` does not look
    return torch.stack(right, dim=-1).cumprod(dim=-1).sum(dim=-1).cpu().numpy()


def replay(reach: np.ndarray, *, start: int, end: int) -> np.ndarray:
    """Accepted tokens of each round of an answer that lies at [start, end)."""
    lengths = []
    last = start  # the last committed token: the first of the answer comes with the prompt
    while last < end - 1:
        lengths.append(min(int(reach[last - 1]), end - 1 - last))
        last += lengths[-1] + 1
    return np.array(lengths, dtype=np.int64)
