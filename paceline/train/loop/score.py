"""Tokens per round of a drafter, computed from its guesses over the target's own greedy answers.

Greedy acceptance keeps a drafted token if and only if it equals the answer's token. So the rounds of the engine can be
replayed over answers that already exist: without an engine, over all rows of all answers at once, and with the same
result. Every round counts, and each has a draft: this is tokens per *round*, not tokens per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch, in_order
from paceline.train.data.teacher import Teacher
from paceline.train.students.labels import Aim
from paceline.train.students.student import Student


@dataclass(frozen=True, slots=True)
class Score:
    """Acceptance over a set of prompts with drafts of `draft` tokens."""

    draft: int
    rounds: int
    accepted: tuple[int, ...]  # tokens, by position in the draft

    @property
    def tokens_per_round(self) -> float:
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of tokens accepted at each position, given that all before it were."""
        before = (self.rounds, *self.accepted)
        return tuple(now / max(1, then) for now, then in zip(self.accepted, before, strict=False))


def evaluate(
    student: Student, teacher: Teacher, exchanges: Sequence[Exchange], *, draft: int, tokens: int, device: torch.device
) -> Score:
    """Score a student on exchanges, in batches of at most `tokens`."""
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
    student: Student, teacher: Teacher, exchanges: Sequence[Exchange], *, aim: Aim, tokens: int, device: torch.device
) -> float:
    """Compute exp(-distance), from 0 to 1, by the distance that the loss of `aim` measures. For the aim `overlap` it is
    the geometric mean of the overlap of the two distributions."""
    distance, answered = 0.0, 0
    for texts in in_order(exchanges, tokens=tokens):
        there, weight = texts.to(device), int((texts.ends - texts.starts).sum())
        distance += weight * student.losses(teacher, teacher(there.ids), there, aim).by_step.mean().item()
        answered += weight
    return math.exp(-distance / max(1, answered))


def reaches(guesses: Tensor, texts: TextBatch) -> np.ndarray:
    """Count the right guesses at the beginning of the chain that starts at each row [sequences, length]."""
    right = [
        guesses[..., step] == texts.ids.roll(-2 - step, dims=1) for step in range(guesses.shape[-1])
    ]  # rows that wrap around are beyond the end, which `replay` does not read
    return torch.stack(right, dim=-1).cumprod(dim=-1).sum(dim=-1).cpu().numpy()


def replay(reach: np.ndarray, *, start: int, end: int) -> np.ndarray:
    """Count the accepted tokens of each round over the answer at positions [start, end)."""
    lengths = []
    last = start  # the last committed token: the pass over the prompt yields the first of the answer
    while last < end - 1:
        lengths.append(min(int(reach[last - 1]), end - 1 - last))
        last += lengths[-1] + 1
    return np.array(lengths, dtype=np.int64)
