"""A step of portable rounds between its launch and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.kernels.edit_reference import RowMasks
from paceline.runner.rounds.protocol import Landed, Path, Seat
from paceline.runner.rounds.rules import RoundRules


@dataclass(slots=True)
class PortableStep:
    """A step in flight: its drafts come first, then the target's output, then its outcomes."""

    read: list[Landed | None]  # outcomes of chunks
    seats: Sequence[Seat]
    drafter: str | None
    drafted: Sequence[int]  # tokens drafted for each seat
    rules: RoundRules | None
    tree: bool  # drafts are trees
    batch: Batch | None = None  # rows of the verification; None: no seat
    owners: Tensor | None = None  # int32 [rows] lane of each row
    ancestors: Tensor | None = None  # int32 [rows, depth] drafted tokens before each row of a tree
    output: Output | None = None  # of the target, with raw logits [rows, vocab]
    parts: list[float] = field(default_factory=list)  # seconds for reading, drafting, verifying; last for accepting
    landed: list[Landed] = field(default_factory=list)  # outcomes of seats

    def rows_of(self, seat: int) -> int:
        return 1 + self.drafted[seat]

    def paths(self, seat: int) -> list[Path]:
        """List the drafted tokens before each row of a seat."""
        assert self.batch is not None, "a step without seats has no drafts"
        first, end = self.batch.row_starts[seat : seat + 2].tolist()
        if self.ancestors is not None:
            return [tuple(token for token in row if token >= 0) for row in self.ancestors[first:end].tolist()]
        drafted = self.batch.tokens[first + 1 : end].tolist()
        return [tuple(drafted[:count]) for count in range(end - first)]


def row_masks(masks: Sequence[np.ndarray | None], device: torch.device) -> RowMasks | None:
    """Copy masks of rows to a device; None: no row has one."""
    there = [mask.view(np.int32) for mask in masks if mask is not None]
    if not there:
        return None
    places = iter(range(len(there)))
    which = torch.tensor([-1 if mask is None else next(places) for mask in masks], dtype=torch.int32, device=device)
    return RowMasks(which, torch.from_numpy(np.stack(there)).to(device))
