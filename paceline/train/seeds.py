"""Random generators that depend on given numbers alone, so that a resumed training needs no stored random state.

A stream number keeps draws for different purposes apart. The batches of an epoch use the epoch as their stream.
"""

from __future__ import annotations

import torch

HELD_OUT_STREAM = 3  # choice of held-out prompts; used with seed 0, never with the user's seed
TEMPERATURE_STREAM = 4  # choice of training answers that are sampled
EAGLE_STREAM = 7  # initial weights of an EAGLE head
SMALL_STREAM = 11  # initial weights of a small model
BLOCK_STREAM = 13  # initial weights of a block drafter


def seeded_generator(*parts: int) -> torch.Generator:
    state = 0
    for part in parts:
        state = (state * 1_000_003 + part + 1) % (1 << 62)
    return torch.Generator().manual_seed(state)
