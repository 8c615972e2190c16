"""The ratio of two speeds that were measured in turns, with a 95 % interval.

A *block* is a stretch of time in which steps of both kinds ran: a few plain ones, and the speculative ones around them.
The machine is as fast for one kind as for the other within a block, however its speed drifts. Over blocks b

    ratio = (Σ tokens / Σ seconds, speculative) / (Σ tokens / Σ seconds, plain)

The interval is the delta method's. With d = t/T − s/S − t'/T' + s'/S', the share of a block in each sum, signed as the
sum stands in the ratio, the variance of log ratio is Σ d². A block that is slow as a whole has d ≈ 0. Old blocks fade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from paceline.types import Speedup

DECAY = 0.98  # weight of the past at each block: (1 + DECAY) / (1 - DECAY), about a hundred blocks, count
MIN_BLOCKS = 8  # blocks below which there is no interval: it would hold the truth too rarely
DRIFT = 1.1  # factor of the deviation: blocks beside each other share some of the machine's drift (simulated)
NORMAL, SMALL_SAMPLE = 1.96, 2.4  # 97.5 % of Student's t with n degrees of freedom is about NORMAL + SMALL_SAMPLE / n


class Ratio:
    """Decayed sums over blocks of four numbers: tokens and seconds, speculative and plain."""

    def __init__(self) -> None:
        self.sums = [0.0] * 4
        self._products = [[0.0] * 4 for _ in range(4)]  # of two of the four numbers of a block, with squared weights
        self._weight = self._squares = 0.0  # sums of the blocks' weights, and of their squares

    def add(self, block: Seq[float]) -> None:
        """Add a block: speculative tokens and seconds, then plain tokens and seconds."""
        self._weight, self._squares = DECAY * self._weight + 1, DECAY * DECAY * self._squares + 1
        for i, x in enumerate(block):
            self.sums[i] = DECAY * self.sums[i] + x
            row = self._products[i]
            for j, y in enumerate(block):
                row[j] = DECAY * DECAY * row[j] + x * y

    @property
    def blocks(self) -> float:
        """Number of blocks of equal weight that would tell as much."""
        return self._weight * self._weight / self._squares if self._squares else 0.0

    @property
    def value(self) -> float:
        """The ratio, known as soon as there is a block."""
        tokens, seconds, plain_tokens, plain_seconds = self.sums
        return tokens / seconds * plain_seconds / plain_tokens

    def speedup(self) -> Speedup | None:
        """Return the ratio with its interval; None: too few blocks."""
        blocks = self.blocks
        if blocks < MIN_BLOCKS - 0.5:  # decay makes eight blocks count a little less than eight
            return None
        tokens, seconds, plain_tokens, plain_seconds = self.sums
        signs = 1 / tokens, -1 / seconds, -1 / plain_tokens, 1 / plain_seconds
        variance = sum(
            x * y * product
            for x, row in zip(signs, self._products, strict=True)
            for y, product in zip(signs, row, strict=True)
        )
        deviation = DRIFT * math.sqrt(max(variance, 0.0) * blocks / (blocks - 1))
        reach = math.exp((NORMAL + SMALL_SAMPLE / (blocks - 1)) * deviation)
        return Speedup(self.value, self.value / reach, self.value * reach)
