"""Arms of a canary: the part of an experiment that a request is in, and how fast its sequence was.

Nouns alone: the server assigns arms, the engine measures speeds, and neither knows how the other does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CANARY, CONTROL = "canary", "control"
ARMS = (CANARY, CONTROL)


@dataclass(frozen=True, slots=True)
class Arm:
    """The arm of a request."""

    name: str  # one of ARMS
    trial: str  # the canary that it belongs to
    kind: str = ""  # kind of work: speeds are compared among requests of one kind


class ArmSpeed(NamedTuple):
    """Tokens of a sequence in decoding steps of about one batch size, and the seconds of these steps that it caused.

    What a drafter's call costs for one sequence depends on how many share it, so the seconds are known within bounds:
    see docs/adr/0032."""

    batch: int  # bits of the batch size less 1
    tokens: int = 0
    least: float = 0.0  # seconds if the whole batch shared the drafter's calls
    most: float = 0.0  # seconds if only the sequences that did share them

    def plus(self, tokens: int, least: float, most: float) -> ArmSpeed:
        return ArmSpeed(self.batch, self.tokens + tokens, self.least + least, self.most + most)
