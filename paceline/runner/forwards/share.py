"""What one rank's program computes of a model that is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.kernels.cpu.segment import Segment


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank. Its heads, MLP columns and tokens are those of its own config."""

    vocab_size: int  # tokens of the whole model
    first_token: int  # first token whose embedding and output the rank has
    inputs: Mapping[str, Sequence[int]]  # inputs of "o" and of "down" that each shard of the rank has
    segment: Segment | None  # memory shared with the other ranks; None: there are none
