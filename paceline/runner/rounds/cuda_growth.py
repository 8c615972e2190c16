"""The trees of a captured round while they grow, see kernels/growth_reference.py."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.cuda.branch import branch
from paceline.kernels.cuda.growth import grow, prune
from paceline.kernels.growth_reference import Growth
from paceline.runner.forwards.device_batch import DeviceBatch
from paceline.runner.rounds.device_state import DeviceState


class CudaGrowth:
    """Grows the trees of all seats of a round, level by level, with all memory that this takes."""

    def __init__(
        self,
        state: DeviceState,
        seats: Tensor,
        *,
        limits: Tensor,
        thresholds: Tensor,
        width: int,
        levels: int,
        context: int,
        pdl: bool,
    ) -> None:
        self._state = state
        self._seats = seats
        self._limits = limits
        self._thresholds = thresholds
        self._growth = Growth.empty(seats=len(seats), width=width, levels=levels, device=state.device)
        self._context = context
        self._pdl = pdl

    @property
    def ends(self) -> Tensor:
        """Say which row of the last pass each row of the next one continues, see CudaHead."""
        return self._growth.ends

    def rows(self, level: int) -> DeviceBatch:
        """Return the rows of the next pass, which read the chosen nodes of the last level."""
        growth = self._growth
        return DeviceBatch(
            tokens=growth.row_tokens,
            positions=growth.positions,
            slots=growth.slots,
            row_starts=growth.row_starts,
            page_table=self._state.pages,
            lanes=self._seats,
            seats=len(self._seats),
            max_rows=growth.width,
            max_context=self._context,
            bases=growth.bases,
            tails=growth.tails[level % 2],
            leads=growth.leads,
        )

    def branch(
        self, logits: Tensor, level: int, *, ids: Tensor | None, fitted: bool, roots: Tensor, ends: Tensor
    ) -> None:
        """Add the best tokens after each row as nodes, and lay out the next pass."""
        branch(
            logits,
            self._state,
            self._growth,
            seats=self._seats,
            level=level,
            ids=ids,
            fitted=fitted,
            pdl=self._pdl,
        )
        grow(
            self._state,
            self._growth,
            seats=self._seats,
            level=level,
            roots=roots,
            ends=ends,
            thresholds=self._thresholds,
            limits=self._limits,
            vocab=logits.shape[1],
            fitted=fitted,
            shared=not fitted,
            pdl=self._pdl,
        )

    def prune(self, found: Tensor) -> None:
        """Write the best nodes of each tree as its draft, and their number."""
        prune(self._state, self._growth, seats=self._seats, limits=self._limits, found=found, pdl=self._pdl)
