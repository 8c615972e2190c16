"""Pooling: one vector for a text, from the hidden states of its tokens after the target's last norm."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class Pool:
    """The sum of the states of a prompt so far, or the state of its last token."""

    def __init__(self, pooling: str, length: int) -> None:
        """`length`: tokens of the prompt."""
        self._first = length - 1 if pooling == "last" else 0  # position of the first token that counts
        self._length = length
        self._read = 0  # positions read so far; a sequence that was preempted reads its prompt again
        self._sum: np.ndarray | None = None

    def add(self, start: int, states: Tensor) -> None:
        """Add the states [rows, hidden] of the tokens from position `start` on. Positions read before are left out."""
        begin, end = max(self._read, self._first, start), min(start + len(states), self._length)
        if begin < end:
            part = states[begin - start : end - start].double().sum(dim=0).cpu().numpy()
            self._sum = part if self._sum is None else self._sum + part
        self._read = max(self._read, end)

    def wanted(self, start: int, count: int) -> int:
        """Return how many of the last rows of a chunk, from position `start` on, have a state that counts."""
        return max(0, min(count, start + count - self._first))

    def embedding(self) -> tuple[float, ...] | None:
        """Return the vector with a length of 1; None as long as the prompt was not read to its end."""
        if self._sum is None or self._read < self._length:
            return None
        return tuple((self._sum / max(float(np.linalg.norm(self._sum)), 1e-12)).tolist())
