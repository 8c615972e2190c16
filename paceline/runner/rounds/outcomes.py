"""The outcome of a round on a CUDA device: one piece of memory, which one copy carries to the host.

time stamps [4], if the round drafts │ reports of `accept` [seats, …] │ scores [seats · steps, 2 + 2 · top], if asked
matches [seats], if copies may take the place of drafts: see lookup_reference.py
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.runner.rounds.alignment import places
from paceline.runner.rounds.buckets import Bucket

MAX_IN_FLIGHT = 4  # steps with memory for outcomes; the engine has fewer in flight
STAMPS = 4  # time stamps of a round that drafts, each of 8 bytes


class Outcome(NamedTuple):
    """Views of one outcome on the device."""

    memory: Tensor  # int32, the whole outcome
    reports: Tensor  # int32 [seats, numbers]: see `accept`, `tree_accept`
    stamps: Tensor | None  # int64 [4]; None: the round does not draft
    scores: Tensor | None  # int32: see kernels/score_reference.py; None: nobody asks
    matches: Tensor | None  # int32 [seats]; None: nobody looks


class Fetched(NamedTuple):
    """Views of one outcome on the host, valid once the step is done. Arrays, because torch reads numbers slowly."""

    memory: Tensor
    reports: np.ndarray
    stamps: np.ndarray | None
    scores: Tensor | None
    matches: np.ndarray | None

    @classmethod
    def of(cls, outcome: Outcome) -> Fetched:
        stamps = None if outcome.stamps is None else outcome.stamps.numpy()
        matches = None if outcome.matches is None else outcome.matches.numpy()
        return cls(outcome.memory, outcome.reports.numpy(), stamps, outcome.scores, matches)


class Outcomes:
    """Memory of a round's outcome on the device, and on the host for each step in flight."""

    def __init__(self, bucket: Bucket, device: torch.device, *, tree: bool) -> None:
        numbers = 4 + (4 if tree else 2) * bucket.longest
        stamps = 2 * STAMPS if bucket.longest else 0
        scores = bucket.seats * (1 + bucket.longest) * 2 * bucket.scores
        matches = bucket.seats if bucket.copies else 0
        self._places, size = places([stamps, bucket.seats * numbers, scores, matches])
        self._seats, self._numbers, self._top = bucket.seats, numbers, bucket.scores
        pinned = device.type == "cuda"
        self.device = self._divide(torch.zeros(size, dtype=torch.int32, device=device))
        # In one piece: each that a device can reach takes long to make.
        pieces = torch.zeros((MAX_IN_FLIGHT, size), dtype=torch.int32, pin_memory=pinned)
        self._host = deque(Fetched.of(self._divide(piece)) for piece in pieces)

    def fetch(self) -> Fetched:
        """Begin to copy the outcome to the host."""
        self._host.rotate()
        outcome = self._host[0]
        outcome.memory.copy_(self.device.memory, non_blocking=True)
        return outcome

    def _divide(self, memory: Tensor) -> Outcome:
        stamps, reports, scores, matches = (memory[place] for place in self._places)
        return Outcome(
            memory,
            reports.view(self._seats, self._numbers),
            stamps.view(torch.int64) if len(stamps) else None,
            scores.view(-1, 2 * self._top) if len(scores) else None,
            matches if len(matches) else None,
        )
