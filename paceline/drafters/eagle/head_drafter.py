"""Drafters over the target's hidden states, EAGLE heads and block drafters: they draft where all states are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, FeatureDrafter, Seen
from paceline.drafters.eagle.reading import HeadReading
from paceline.runner.batch import Share
from paceline.types import Off

STATE_BYTES = 256 << 20  # bytes of memory for hidden states: about 39,000 tokens of SmolLM2


class HeadDrafter(FeatureDrafter):
    """A drafter over hidden states. Derive from it, and write `draft`."""

    ends_drafts = True

    def __init__(self, reading: HeadReading) -> None:
        self._reading = reading

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._reading.start(key, lane, tokens)

    def stop(self, key: int) -> None:
        self._reading.stop(key)

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        return self._reading.feed(features, seen, crowded=crowded)

    def knows(self, page: int) -> bool:
        return self._reading.knows(page)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = self._reading.catch_up(asks)
        if not ready:
            return [EMPTY] * len(asks)
        made = self.draft(ready, *self._reading.take_held(ready))
        drafts = dict(zip([ask.key for ask in ready], made, strict=True))
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    @abstractmethod
    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        """Read the last hidden states of each sequence, `features` [rows of all shares, width], and draft."""
