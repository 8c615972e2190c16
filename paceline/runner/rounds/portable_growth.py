"""The trees of a portable round while they grow, see kernels/growth_reference.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.kernels import growth_reference as ops
from paceline.kernels.base import Batch
from paceline.runner.heads.protocol import HeadForward
from paceline.runner.rounds.device_state import DeviceState


class PortableGrowth:
    """Grows the trees of all seats of a round, level by level. Rows that read no node take no part in passes."""

    def __init__(self, state: DeviceState, seats: Tensor, *, limits: Tensor, width: int, levels: int) -> None:
        self._state = state
        self._seats = seats
        self._limits = limits
        self._growth = ops.Growth.empty(seats=len(seats), width=width, levels=levels, device=state.device)
        self._places: dict[int, int] = {}  # row of the growth → row of the head's last pass

    def branch(
        self,
        logits: Tensor,
        level: int,
        *,
        ids: Tensor | None,
        fitted: bool,
        roots: Tensor,
        ends: Tensor,
        thresholds: Tensor,
    ) -> None:
        """Add the best tokens after each row as nodes, and lay out the next pass."""
        growth, seats = self._growth, self._seats
        ops.branch(logits, self._state, growth, seats=seats, level=level, ids=ids, fitted=fitted)
        ops.grow(
            self._state,
            growth,
            seats=seats,
            level=level,
            roots=roots,
            ends=ends,
            thresholds=thresholds,
            limits=self._limits,
            shared=not fitted,
        )

    def guess(self, head: HeadForward, level: int, page_table: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Read the chosen nodes of the last level; return logits [seats · width, draft vocabulary]."""
        growth = self._growth
        whole = torch.zeros(len(growth.row_tokens), len(head.ids))
        carry = growth.ends[1:].tolist()
        counts, rows = [], []
        for seat, chosen in enumerate(growth.chosen.tolist()):
            own = [seat * growth.width + i for i, node in enumerate(chosen) if node >= 0]
            rows += sorted(own, key=lambda row: (carry[row], row))
            counts.append(len(own))
        if not rows:
            return whole
        continued = [carry[row] - 1 if level == 1 else self._places[carry[row] - 1] for row in rows]
        batch = self._batch(rows, counts, level, page_table)
        self._places = {row: place for place, row in enumerate(rows)}
        whole[rows] = head(batch, carry=continued).logits
        return whole

    def prune(self, found: Tensor) -> None:
        """Write the best nodes of each tree as its draft, and their number."""
        ops.prune(self._state, self._growth, seats=self._seats, limits=self._limits, found=found)

    def _batch(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        level: int,
        page_table: Callable[[Tensor, Tensor], Tensor],
    ) -> Batch:
        growth = self._growth
        there = [seat for seat, count in enumerate(counts) if count]
        starts = [0, *accumulate(count for count in counts if count)]
        bases = growth.bases[there]
        return Batch(
            tokens=growth.row_tokens[rows],
            positions=growth.positions[rows],
            slots=growth.slots[rows],
            row_starts=torch.tensor(starts, dtype=torch.int32),
            bases=bases,
            page_table=page_table(self._seats[there], bases),
            logit_rows=torch.arange(len(rows), dtype=torch.int32),
            tails=growth.tails[level % 2, rows, :level].contiguous(),
        )
