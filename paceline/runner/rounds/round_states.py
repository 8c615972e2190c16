"""Hidden states of a round, for drafters on the host: copied beside the next step, read when the round has landed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.runner.rounds.protocol import Landed, Seat


@dataclass(frozen=True, slots=True)
class RoundStates:
    """Hidden states of the rows of a round in the host's memory, valid once the step is done."""

    states: Tensor  # [rows, taps * hidden]
    row_starts: Tensor  # int32 [seats + 1]

    def attach(self, landed: list[Landed], seats: Sequence[Seat]) -> None:
        """Add the states of committed positions to the outcomes of the seats that want them."""
        starts = self.row_starts.tolist()
        for index, (seat, start) in enumerate(zip(seats, starts, strict=False)):
            if seat.tapped:
                rows = [start, *(start + 1 + node for node in landed[index].path)]
                landed[index] = landed[index]._replace(features=self.states[rows].float())
