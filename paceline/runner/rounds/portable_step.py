"""A step of portable rounds between its launch and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.runner.rounds.protocol import Landed, Seat
from paceline.runner.rounds.rules import RoundRules
from paceline.sampling.words import Branch, MaskSheet, branches


@dataclass(slots=True)
class PortableStep:
    """A step in flight: its drafts come first, then the target's output, then its outcomes."""

    read: list[Landed | None]  # outcomes of chunks
    seats: Sequence[Seat]
    masked: Sequence[int]  # seats that draw with masks
    drafter: str | None
    drafted: Sequence[int]  # tokens drafted for each seat
    rules: RoundRules | None
    tree: bool  # drafts are trees
    matches: Sequence[int] = ()  # reports of `lookup_reference.copy_sure`; empty: nobody looked
    batch: Batch | None = None  # rows of the verification; None: no seat
    owners: Tensor | None = None  # int32 [rows] lane of each row
    ancestors: Tensor | None = None  # int32 [rows, depth] drafted tokens before each row of a tree
    output: Output | None = None  # of the target, with raw logits [rows, vocab]
    parts: list[float] = field(default_factory=list)  # seconds for reading, drafting, verifying; last for accepting
    landed: list[Landed] = field(default_factory=list)  # outcomes of seats

    sheet: MaskSheet | None = None  # the masks of rows

    def branches(self, seat: int) -> list[Branch]:
        """List the branches of a seat's draft."""
        assert self.batch is not None, "a step without seats has no drafts"
        first, end = self.batch.row_starts[seat : seat + 2].tolist()
        if self.ancestors is not None:
            paths = [tuple(token for token in row if token >= 0) for row in self.ancestors[first:end].tolist()]
            return branches(paths, first)
        return [Branch(tuple(self.batch.tokens[first + 1 : end].tolist()), range(first, end))]
