"""One captured round on a CUDA device: draft, verify, draw and accept, for the steps of one bucket.

A round is a sequence of launches over memory that keeps its address, so that it can be captured as a CUDA graph and
replayed. Without a graph it runs the same launches one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.kernels.base import Forward
from paceline.kernels.cuda.clock import stamp
from paceline.kernels.cuda.edit import count, edit, raw_rows
from paceline.kernels.cuda.lookup import lookup
from paceline.kernels.cuda.offer import offer
from paceline.kernels.cuda.rounds import accept, layout
from paceline.kernels.cuda.sample import draw
from paceline.kernels.offer_reference import HEADER
from paceline.runner.forwards.cuda import CudaForward, DeviceBatch
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import DeviceDrafter, Seat, write_offer
from paceline.runner.rounds.rules import Judge, RoundRules
from paceline.runner.rounds.scores import Verified

MAX_IN_FLIGHT = 4  # steps with memory for outcomes; the engine has fewer in flight


class Recorder:
    """Records launches as graphs that share one pool of memory, which is safe as long as they run one by one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record launches whose kernels are compiled and whose buffers exist. The device may be busy meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


class CudaRound:
    """The launches of one bucket, with all memory that they use between passes. Implements DraftingRound."""

    def __init__(
        self,
        bucket: Bucket,
        state: DeviceState,
        target: CudaForward,
        drafter: DeviceDrafter | None,
        synthetic_acceptance: float,
        *,
        max_draft: int,
        judge: Judge | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._bucket = bucket
        self.state = state
        self.longest = bucket.draft
        self._target = target
        self._drafter = drafter
        self._synthetic_acceptance = synthetic_acceptance
        self._pdl = target.decoder.pdl
        self._recorder = recorder
        self._graph: torch.cuda.CUDAGraph | None = None
        seats, rows = bucket.seats, max(bucket.rows, 2 * bucket.seats)
        device = state.device
        # What the host sends for a step: [2, seats] lanes and rows wanted, then its offers, a row for each seat.
        # An offer has room for what a step in flight may commit (max_draft + 1 tokens), and for the draft after it.
        width = HEADER + max_draft + 1 + bucket.offers if bucket.offers else 0
        self._sent = torch.zeros(seats * (2 + width), dtype=torch.int32, device=device)
        self._asked = self._sent[: 2 * seats].view(2, seats)
        self._offers = self._sent[2 * seats :].view(seats, width)
        self._asked[0] = state.dummy
        self._asked[1] = 1 + bucket.draft
        self._counts, self._drawn, self._limits = (
            torch.zeros(seats, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._same_counts = {rows: torch.full_like(self._limits, rows) for rows in (1, 2)}  # rows of a draft pass
        self._starts = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._rows = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)]
        self._targets = torch.zeros(rows, dtype=torch.int32, device=device)
        self._out = torch.zeros((seats, 2 + 2 * (bucket.longest + 1)), dtype=torch.int32, device=device)
        self._stamps = torch.zeros(4, dtype=torch.int64, device=device) if bucket.longest else None
        pinned = device.type == "cuda"
        self._asks = deque(torch.zeros_like(self._sent, device="cpu", pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._outs = deque(torch.zeros_like(self._out, device="cpu", pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._times = deque(torch.zeros(4, dtype=torch.int64, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._last: Sequence[Seat] | None = None
        self.verified: Verified | None = None  # memory that the latest launch leaves for scores
        self._judge = judge
        self._rules = self._make_rules(target.vocab_size)
        self._floors = torch.zeros(rows, device=device) if self._rules else None

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def run_once(self) -> None:
        """Run on the dummy lane, so that every kernel is compiled and every buffer exists."""
        self._run()

    def record(self) -> None:
        """Record the launches, to be replayed from now on. The round has run before."""
        assert self._recorder is not None, "rounds without graphs are not recorded"
        self._graph = self._recorder(self._run)

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
        sent, count = self._asks[0].numpy(), self._bucket.seats
        lanes, wanted = sent[:count], sent[count : 2 * count]
        lanes[:], wanted[:] = self.state.dummy, 1
        offers = sent[2 * count :].reshape(self._offers.shape)
        offers[:, :HEADER] = 0
        for i, seat in enumerate(seats):
            lanes[i] = seat.lane
            if seat.offer is None:
                wanted[i] = 1 + min(seat.max_draft, self._bucket.draft)
            else:
                write_offer(offers[i], seat.offer, most=min(seat.max_draft, self._bucket.offers))
        self._sent.copy_(self._asks[0], non_blocking=True)
        if self._rules is not None:
            self._rules.ask(seats)
        self._last = list(seats)

    def _run(self) -> None:
        bucket, state, pdl = self._bucket, self.state, self._pdl
        self._stamp(0)
        if self._rules is not None:
            self._rules.begin()
        self._draft()
        self._stamp(1)
        if self._drafter is None or not self._drafter.finds_fewer:
            self._counts.copy_(self._asked[1])
        if bucket.offers:
            offer(state, seats=self._asked[0], offers=self._offers, counts=self._counts, pdl=pdl)
        rows = self._lay_out(self._counts, first=-1, rows=bucket.rows, longest=1 + bucket.longest)
        logits = self._target.decoder.logits(rows, self._target.kv)
        self._stamp(2)
        targets, owners = self._targets[: bucket.rows], self._rows[3][: bucket.rows]
        raw = raw_rows(bucket.rows, logits.shape[1], state.device) if bucket.edits else None
        self.verified = Verified(logits, self._out, self._starts, owners, raw)
        if bucket.edits:
            edit(logits, state, lanes=owners, positions=rows.positions, offset=1, raw=raw, pdl=pdl)
        draw(
            logits,
            state,
            lanes=owners,
            positions=rows.positions,
            offset=1,
            out=targets,
            filters=bucket.filters,
            floors=None if self._floors is None else self._floors[: bucket.rows],
            pdl=pdl,
        )
        accept(
            state,
            seats=self._asked[0],
            targets=targets,
            out=self._out,
            row_starts=self._starts,
            verdicts=self._verdicts(logits, rows.tokens, targets),
            synthetic_acceptance=self._synthetic_acceptance,
            pdl=pdl,
        )
        if bucket.edits:
            count(state, seats=self._asked[0], outcomes=self._out, pdl=pdl)
        self._stamp(3)

    def _make_rules(self, vocab: int) -> RoundRules | None:
        bucket = self._bucket
        if not bucket.rules:
            return None
        rules = RoundRules(
            bucket.rules, bucket.judged, seats=bucket.seats, longest=bucket.longest, vocab=vocab, state=self.state
        )
        rules.attend(self._asked[0])
        return rules

    def _verdicts(self, logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Let the rules of the seats judge their drafts; None: the coupled rule judges all of them."""
        if self._rules is None or self._judge is None or self._floors is None:
            return None
        return self._rules.judge(
            self._judge, logits, self._floors, tokens=tokens, targets=targets, row_starts=self._starts
        )

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
        if self._bucket.edits:
            edit(logits, self.state, lanes=self._asked[0], offset=turn, pdl=self._pdl)
        floors = None if self._floors is None else self._floors[: len(logits)]
        draw(
            logits,
            self.state,
            lanes=self._asked[0],
            offset=turn,
            out=self._drawn,
            push=True,
            filters=self._bucket.filters,
            free=None if self._rules is None else self._rules.free,
            floors=floors,
            pdl=self._pdl,
        )
        if self._rules is not None and floors is not None:
            self._rules.keep(logits, floors, turn)

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

    def _stamp(self, index: int) -> None:
        if self._stamps is not None and self._stamps.is_cuda:
            stamp(self._stamps, index, pdl=self._pdl)


def on_cuda(model: Forward) -> CudaForward:
    """Check that rounds on a CUDA device can run a drafter's model."""
    if not isinstance(model, CudaForward):
        raise TypeError(f"rounds on a CUDA device run models that are CudaForwards, not {type(model).__name__}")
    return model
