"""The rows of passes in plain torch: drafts of seats, chains or trees, and chunks of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels import round_reference as ops
from paceline.kernels import tree_reference as tree_ops
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Chunk


class PortableRows:
    """Lays out the rows of a pass from the lanes of a device."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def of_seats(self, seats: Tensor, counts: list[int], *, first: int) -> tuple[Batch, Tensor]:
        """Lay out rows from each seat's length + `first` on, all with logits; return them and the lane of each row."""
        made = self._empty_rows(counts)
        ops.layout(self._state, seats=seats, counts=self.ints(counts), first=first, pdl=False, **made)
        bases = made["positions"][made["row_starts"][1:].long() - 1] + 1
        return self._laid_out(seats, made, bases)

    def of_trees(self, seats: Tensor, counts: list[int]) -> tuple[Batch, Tensor, Tensor]:
        """Lay out the trees of all seats; return the rows, the lane of each, and the tokens of each row's path."""
        made, leads, bases = self._empty_rows(counts), self.ints([0] * sum(counts)), self.ints([0] * len(counts))
        tails, ancestors = torch.zeros((2, len(leads), max(counts) - 1), dtype=torch.int32, device=leads.device)
        made |= {"bases": bases, "tails": tails, "leads": leads, "ancestors": ancestors}
        tree_ops.tree_layout(self._state, seats=seats, counts=self.ints(counts), pdl=False, **made)
        batch, owners = self._laid_out(seats, made, bases)
        return replace(batch, tails=tails[leads.long()]), owners, ancestors

    def _empty_rows(self, counts: list[int]) -> dict[str, Tensor]:
        rows = {name: self.ints([0] * sum(counts)) for name in ("tokens", "positions", "slots", "owners")}
        return {"row_starts": self.ints([0] * (len(counts) + 1)), **rows}

    def _laid_out(self, seats: Tensor, made: Mapping[str, Tensor], bases: Tensor) -> tuple[Batch, Tensor]:
        batch = Batch(
            tokens=made["tokens"],
            positions=made["positions"],
            slots=made["slots"],
            row_starts=made["row_starts"],
            bases=bases,
            page_table=self.page_table(seats, bases),
            logit_rows=self.ints(range(len(made["tokens"]))),
        )
        return batch, made["owners"]

    def of_chunks(self, chunks: Sequence[Chunk], outs: Sequence[int], *, ahead: int = 0) -> Batch:
        state, places = self._state, [range(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        seats = self.ints([chunk.lane for chunk in chunks])
        counts = self.ints([chunk.count for chunk in chunks])
        owners = seats.repeat_interleave(counts).long()
        positions = self.ints([*itertools.chain(*places)])
        bases = self.ints([place.stop for place in places])
        return Batch(
            tokens=state.tokens[owners, positions.long() + ahead],
            positions=positions,
            slots=state.pages[owners, positions.long() // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            row_starts=self.ints([0, *itertools.accumulate(chunk.count for chunk in chunks)]),
            bases=bases,
            page_table=self.page_table(seats, bases),
            logit_rows=self.ints(outs),
            states=any(chunk.states for chunk in chunks),
        )

    def page_table(self, seats: Tensor, bases: Tensor) -> Tensor:
        table: Tensor = self._state.pages[seats.long(), : -(-int(bases.max()) // PAGE_SIZE)]
        return table.contiguous()

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._state.device)
