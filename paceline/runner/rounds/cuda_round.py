"""One captured round on a CUDA device: draft, verify, draw and accept, for the steps of one bucket.

A round is a sequence of launches over memory that keeps its address, so that it can be captured as a CUDA graph and
replayed. Without a graph it runs the same launches one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.base import Forward
from paceline.kernels.cuda.clock import stamp
from paceline.kernels.cuda.lookup import lookup
from paceline.kernels.cuda.rounds import accept, layout
from paceline.kernels.cuda.sample import draw
from paceline.kernels.cuda.tree import tree_accept, tree_layout, tree_move
from paceline.runner.forwards.cuda import CudaForward, DeviceBatch
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import DeviceDrafter, Seat, drafts_trees

MAX_IN_FLIGHT = 4  # steps with memory for outcomes; the engine has fewer in flight


class CudaRound:
    """The launches of one bucket, with all memory that they use between passes. Implements DraftingRound."""

    def __init__(
        self,
        bucket: Bucket,
        state: DeviceState,
        target: CudaForward,
        drafter: DeviceDrafter | None,
        synthetic_acceptance: float,
    ) -> None:
        self._bucket = bucket
        self.state = state
        self.longest = bucket.draft
        self._target = target
        self._drafter = drafter
        self._synthetic_acceptance = synthetic_acceptance
        self._pdl = target.decoder.pdl
        self._graph: torch.cuda.CUDAGraph | None = None
        seats, rows = bucket.seats, max(bucket.rows, 2 * bucket.seats)
        device = state.device
        self._asked = torch.zeros((2, seats), dtype=torch.int32, device=device)  # lanes, rows wanted
        self._asked[0] = state.dummy
        self._asked[1] = 1 + bucket.draft
        self._counts, self._drawn, self._limits = (
            torch.zeros(seats, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._same_counts = {rows: torch.full_like(self._limits, rows) for rows in (1, 2)}  # rows of a draft pass
        self._starts = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._rows = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)]
        self._targets = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tree = bucket.draft > 0 and drafts_trees(drafter)
        self._tails = torch.zeros((rows if self.tree else 0, bucket.draft), dtype=torch.int32, device=device)
        self._leads, self._bases = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, seats))
        outcome = 4 + (4 if self.tree else 2) * bucket.draft  # numbers: see tree_accept, accept
        self._out = torch.zeros((seats, outcome), dtype=torch.int32, device=device)
        self._stamps = torch.zeros(4, dtype=torch.int64, device=device) if bucket.draft else None
        pinned = device.type == "cuda"
        self._asks = deque(torch.zeros((2, seats), dtype=torch.int32, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._outs = deque(torch.zeros_like(self._out, device="cpu", pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._times = deque(torch.zeros(4, dtype=torch.int64, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._last: Sequence[Seat] | None = None

    def capture(self, pool: Any) -> None:
        """Run once on the dummy lane, so that every kernel is compiled and every buffer exists, then record."""
        self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._run()

    def __call__(self, seats: Sequence[Seat]) -> tuple[Tensor, Tensor | None]:
        """Launch the round; return outcomes, and time stamps if it drafts, in the host's memory.

        Both are valid once the step is done."""
        if seats != self._last:
            self._ask(seats)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._outs.rotate()
        outcomes = self._outs[0].copy_(self._out, non_blocking=True)
        if self._stamps is None:
            return outcomes, None
        self._times.rotate()
        return outcomes, self._times[0].copy_(self._stamps, non_blocking=True)

    def _ask(self, seats: Sequence[Seat]) -> None:
        self._asks.rotate()
        asked = self._asks[0]
        lanes, wanted = asked.numpy()
        lanes[:], wanted[:] = self.state.dummy, 1
        for i, seat in enumerate(seats):
            lanes[i], wanted[i] = seat.lane, 1 + min(seat.max_draft, self._bucket.draft)
        self._asked.copy_(asked, non_blocking=True)
        self._last = list(seats)

    def _run(self) -> None:
        bucket, state, pdl = self._bucket, self.state, self._pdl
        self._stamp(0)
        self._draft()
        self._stamp(1)
        if self._drafter is None or not self._drafter.finds_fewer:
            self._counts.copy_(self._asked[1])
        rows = (
            self._lay_out_trees()
            if self.tree
            else self._lay_out(self._counts, first=-1, rows=bucket.rows, longest=1 + bucket.draft)
        )
        logits = self._target.decoder.logits(rows, self._target.kv)
        self._stamp(2)
        targets, owners = self._targets[: bucket.rows], self._rows[3][: bucket.rows]
        draw(
            logits,
            state,
            lanes=owners,
            positions=rows.positions,
            offset=1,
            out=targets,
            filters=bucket.filters,
            pdl=pdl,
        )
        self._accept(targets)
        self._stamp(3)

    def _accept(self, targets: Tensor) -> None:
        accepting = tree_accept if self.tree else accept
        accepting(
            self.state,
            seats=self._asked[0],
            targets=targets,
            out=self._out,
            row_starts=self._starts,
            synthetic_acceptance=self._synthetic_acceptance,
            pdl=self._pdl,
        )
        if self.tree:
            tree_move(self.state, self._target.kv, seats=self._asked[0], out=self._out, pdl=self._pdl)

    def _draft(self) -> None:
        if self._drafter is not None:
            self._drafter.draft(self)
            if self._drafter.finds_fewer:
                self._counts.add_(1)  # from tokens found to rows of the verification

    # ── for drafters ──

    @property
    def lanes(self) -> Tensor:
        return self._asked[0]

    @property
    def found(self) -> Tensor:
        return self._counts

    def limits(self) -> Tensor:
        return torch.sub(self._asked[1], 1, out=self._limits)

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        forward = on_cuda(model)
        laid = self._lay_out(self._same_counts[rows], first=turn - rows, rows=rows * self._bucket.seats, longest=rows)
        return forward.decoder.logits(laid, forward.kv, every=rows)[:, : self._target.vocab_size]

    def append(self, logits: Tensor, turn: int) -> None:
        draw(
            logits,
            self.state,
            lanes=self._asked[0],
            offset=turn,
            out=self._drawn,
            push=True,
            filters=self._bucket.filters,
            pdl=self._pdl,
        )

    def look_up(self, *, min_ngram: int, max_ngram: int) -> None:
        lookup(
            self.state,
            seats=self._asked[0],
            limits=self.limits(),
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            found=self._counts,
            pdl=self._pdl,
        )

    def _lay_out(self, counts: Tensor, *, first: int, rows: int, longest: int) -> DeviceBatch:
        tokens, positions, slots, owners = (part[:rows] for part in self._rows)
        layout(
            self.state,
            seats=self._asked[0],
            counts=counts,
            first=first,
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=self._starts,
            pdl=self._pdl,
        )
        return DeviceBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            row_starts=self._starts,
            page_table=self.state.pages,
            lanes=self._asked[0],
            seats=self._bucket.seats,
            max_rows=longest,
            max_context=self._bucket.context,
        )

    def _lay_out_trees(self) -> DeviceBatch:
        """Lay out the rows of the verification: the last committed token and the tree of each seat."""
        rows, draft = self._bucket.rows, self._bucket.draft
        tokens, positions, slots, owners = (part[:rows] for part in self._rows)
        tails, leads = self._tails[:rows], self._leads[:rows]
        tree_layout(
            self.state,
            seats=self._asked[0],
            counts=self._counts,
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=self._starts,
            bases=self._bases,
            tails=tails,
            leads=leads,
            pdl=self._pdl,
        )
        return DeviceBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            row_starts=self._starts,
            page_table=self.state.pages,
            lanes=self._asked[0],
            seats=self._bucket.seats,
            max_rows=1 + draft,
            max_context=self._bucket.context,
            bases=self._bases,
            tails=tails,
            leads=leads,
        )

    def _stamp(self, index: int) -> None:
        if self._stamps is not None and self._stamps.is_cuda:
            stamp(self._stamps, index, pdl=self._pdl)


def on_cuda(model: Forward) -> CudaForward:
    """Check that rounds on a CUDA device can run a drafter's model."""
    if not isinstance(model, CudaForward):
        raise TypeError(f"rounds on a CUDA device run models that are CudaForwards, not {type(model).__name__}")
    return model
