"""One captured round on a CUDA device: draft, verify, draw and accept, for the steps of one bucket.

A round is a sequence of launches over memory that keeps its address, so that it can be captured as a CUDA graph and
replayed. Without a graph it runs the same launches one by one.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import Forward
from paceline.kernels.cuda.clock import stamp
from paceline.kernels.cuda.edit import count, edit, raw_rows
from paceline.kernels.cuda.lookup import lookup
from paceline.kernels.cuda.offer import offer
from paceline.kernels.cuda.rounds import accept, layout
from paceline.kernels.cuda.sample import draw
from paceline.kernels.cuda.states import hold, take
from paceline.kernels.cuda.tree import tree_accept, tree_layout, tree_move
from paceline.kernels.offer_reference import HEADER
from paceline.kernels.round_reference import Doubt, spread
from paceline.kernels.states_reference import HeldStates, Taken, last
from paceline.runner.forwards.cuda import CudaForward, DeviceBatch
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.protocol import Head
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda_growth import CudaGrowth
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import (
    SPARE_STATES,
    DeviceDrafter,
    Seat,
    drafts_trees,
    taps_of,
    threshold_of,
    write_offer,
)
from paceline.runner.rounds.rules import Judge, RoundRules
from paceline.runner.rounds.scores import Verified

ASKED = 4  # numbers that the host sends for each seat
MAX_IN_FLIGHT = 4  # steps with memory for outcomes; the engine has fewer in flight


class Recorder:
    """Records launches as graphs that share one pool of memory, which is safe as long as they run one by one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record launches whose kernels are compiled and whose buffers exist. The device may be busy meanwhile.

        No garbage is collected while recording: the end of another engine's graph would break the record."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _without_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaRound:
    """The launches of one bucket, with all memory that they use between passes. Implements DraftingRound."""

    def __init__(
        self,
        bucket: Bucket,
        state: DeviceState,
        target: CudaForward,
        drafter: DeviceDrafter | None,
        held: HeldStates | None,
        synthetic_acceptance: float,
        *,
        max_draft: int,
        judge: Judge | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`held`: the hidden states of a drafter with taps."""
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
        # What the host sends for a step: [4, seats] lanes, rows wanted, drafted tokens wanted and bits of the drafts'
        # thresholds, then its offers, a row for each seat.
        # An offer has room for what a step in flight may commit (max_draft + 1 tokens), and for the draft after it.
        width = HEADER + max_draft + 1 + bucket.offers if bucket.offers else 0
        self._sent = torch.zeros(seats * (ASKED + width), dtype=torch.int32, device=device)
        self._asked = self._sent[: ASKED * seats].view(ASKED, seats)
        self._offers = self._sent[ASKED * seats :].view(seats, width)
        self._asked[0] = state.dummy
        self._asked[1] = 1 + bucket.draft
        self._asked[2] = bucket.draft
        self._counts, self._drawn = (torch.zeros(seats, dtype=torch.int32, device=device) for _ in range(2))
        self._same_counts = {rows: torch.full_like(self._counts, rows) for rows in (1, 2)}  # rows of a draft pass
        self._starts = torch.zeros(seats + 1, dtype=torch.int32, device=device)
        self._rows = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)]
        self._targets = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tree = bucket.draft > 0 and drafts_trees(drafter)
        self._growth: CudaGrowth | None = None  # None: no tree has been planted
        shape = (2, rows if self.tree else 0, bucket.longest)
        self._tails, self._ancestors = torch.zeros(shape, dtype=torch.int32, device=device)
        self._leads, self._bases = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, seats))
        outcome = 4 + (4 if self.tree else 2) * bucket.longest  # numbers: see tree_accept, accept
        self._out = torch.zeros((seats, outcome), dtype=torch.int32, device=device)
        self._held = held
        self._taken: Taken | None = None  # rows of a head's first pass
        self._kept: Tensor | None = None  # [rows, width] hidden states of the verified rows
        if held is not None:
            self._hold_states(held)
        self._stamps = torch.zeros(4, dtype=torch.int64, device=device) if bucket.longest else None
        self._asks, self._outs = _host_memory(self._sent), _host_memory(self._out)
        self._times = _host_memory(self._stamps) if self._stamps is not None else deque()
        self._last: Sequence[Seat] | None = None
        self.verified: Verified | None = None  # memory that the latest launch leaves for scores
        self._judge = judge
        self._rules = self._make_rules(target.vocab_size)
        self._floors = torch.zeros(rows, device=device) if self._rules else None

    def _hold_states(self, held: HeldStates) -> None:
        """Find memory for the hidden states of the verified rows, and for the rows of a head's first pass. Rounds share
        it, because they run one after the other."""
        bucket, device = self._bucket, self.state.device
        self._kept = held.buffer("kept", bucket.rows)
        if bucket.draft:
            features, turns = held.buffer("features", bucket.rows), bucket.draft - 1
            taken = Taken.empty(seats=bucket.seats, rows=bucket.rows, turns=turns, features=features, device=device)
            self._taken = replace(taken, found=self._counts)
            self._singles = torch.arange(bucket.seats + 1, dtype=torch.int32, device=device)  # one row for each seat

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
        lanes, wanted, limits, thresholds = sent[: ASKED * count].reshape(ASKED, count)
        lanes[:], wanted[:], limits[:] = self.state.dummy, 1, 0
        offers = sent[ASKED * count :].reshape(self._offers.shape)
        offers[:, :HEADER] = 0
        lanes[: len(seats)] = [seat.lane for seat in seats]
        limits[: len(seats)] = [0 if seat.offer else min(seat.max_draft, self._bucket.draft) for seat in seats]
        wanted += limits
        for i, seat in enumerate(seats):
            if seat.offer is not None:
                write_offer(offers[i], seat.offer, most=min(seat.max_draft, self._bucket.offers))
        if self._drafter is not None:
            thresholds.view(np.float32)[: len(seats)] = [threshold_of(self._drafter, seat) for seat in seats]
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
        if self._drafter is None or not self._drafter.finds_fewer or not bucket.draft:
            self._counts.copy_(self._asked[1])
        if bucket.offers:
            offer(state, seats=self._asked[0], offers=self._offers, counts=self._counts, pdl=pdl)
        rows = self._lay_out_draft()
        taps = () if self._drafter is None else taps_of(self._drafter)
        logits = self._target.decoder.logits(rows, self._target.kv, taps=taps, kept=self._kept)
        self._stamp(2)
        targets, owners = self._targets[: bucket.rows], self._rows[3][: bucket.rows]
        raw = raw_rows(bucket.rows, logits.shape[1], state.device) if bucket.edits else None
        self.verified = Verified(logits, self._out, self._starts, owners, raw, self.tree)
        if bucket.edits:
            before = self._ancestors[: bucket.rows] if self.tree else None
            edit(logits, state, lanes=owners, positions=rows.positions, offset=1, ancestors=before, raw=raw, pdl=pdl)
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
        self._accept(targets, self._verdicts(logits, rows.tokens, targets))
        if bucket.edits:
            count(state, seats=self._asked[0], outcomes=self._out, pdl=pdl)
        self._hold()
        self._stamp(3)

    def _accept(self, targets: Tensor, verdicts: Tensor | None) -> None:
        """Commit what the target agrees with; keys and values of a path through a tree move to their positions."""
        accepting = tree_accept if self.tree else partial(accept, verdicts=verdicts)
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
            assert verdicts is None, "only the coupled rule judges trees"
            tree_move(self.state, self._target.kv, seats=self._asked[0], out=self._out, pdl=self._pdl)

    def _hold(self) -> None:
        """Hold the hidden states of the rows that were accepted, for the drafter's next draft."""
        if self._held is None or self._kept is None:
            return
        hold(
            self._held,
            self.state,
            seats=self._asked[0],
            starts=self._starts,
            outcomes=self._out,
            features=self._kept,
            read=self._asked[2] if self._bucket.draft else None,
            tree=self.tree,
            pdl=self._pdl,
        )

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
        if self._drafter is not None and self._bucket.draft:
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
        return self._asked[2]

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        forward = on_cuda(model)
        laid = self._lay_out(self._same_counts[rows], first=turn - rows, rows=rows * self._bucket.seats, longest=rows)
        return forward.decoder.logits(laid, forward.kv, every=rows)[:, : self._target.vocab_size]

    def guess(self, head: Head, turn: int) -> Tensor:
        assert isinstance(head, CudaHead), f"rounds on a CUDA device run CudaHeads, not a {type(head).__name__}"
        held, taken = self._held, self._taken
        if held is None or taken is None:
            raise TypeError("a drafter that runs a head names its taps")
        if turn == 0:
            most = held.capacity - SPARE_STATES  # more would be more than one block of attention
            take(held, self.state, seats=self.lanes, limits=self.limits(), most=most, into=taken, pdl=self._pdl)
            rows = self._batch(taken.tokens, taken.positions, taken.slots, taken.row_starts, most)
            return head.first(rows, taken.features)
        if self._growth is not None:
            return head.further(self._growth.rows(turn), turn, ends=self._growth.ends)
        later = taken.later_positions[turn - 1], taken.later_slots[turn - 1]
        return head.further(self._batch(self._drawn, *later, self._singles, 1), turn)

    def last_states(self) -> Tensor:
        if self._held is None or self._taken is None:
            raise TypeError("a drafter that reads hidden states names its taps")
        states, there = last(self._held, self.state, seats=self.lanes)
        self._taken.confidence.copy_(torch.where(there, 1.0, -1.0))
        self._counts.zero_()
        return states

    def append(self, logits: Tensor, turn: int, *, ids: Tensor | None = None, doubting: bool = False) -> None:
        doubt = None
        if doubting:
            assert self._taken is not None, "only a drafter with taps can doubt its drafts"
            thresholds = self._asked[3].view(torch.float32)
            doubt = Doubt(self._taken.confidence, thresholds, self._asked[2], self._counts, turn)
        if ids is not None and (self._bucket.edits or self._rules is not None):
            logits, ids = spread(logits, ids, vocab=self._target.vocab_size), None
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
            ids=ids,
            doubt=doubt,
            filters=self._bucket.filters,
            free=None if self._rules is None else self._rules.free,
            floors=floors,
            pdl=self._pdl,
        )
        if self._rules is not None and floors is not None:
            self._rules.keep(logits, floors, turn)

    def plant(self, *, width: int, levels: int) -> None:
        if self._growth is None:  # else the same launches run again
            self._growth = CudaGrowth(
                self.state,
                self.lanes,
                limits=self.limits(),
                thresholds=self._asked[3].view(torch.float32),
                width=width,
                levels=levels,
                context=self._bucket.context,
                pdl=self._pdl,
            )

    def branch(self, logits: Tensor, level: int, *, ids: Tensor | None = None, fitted: bool = True) -> None:
        assert self._growth is not None, "a tree must be planted first"
        assert self._taken is not None, "only a drafter with taps can grow trees"
        roots, ends = self._taken.confidence, self._taken.row_starts
        self._growth.branch(logits, level, ids=ids, fitted=fitted, roots=roots, ends=ends)

    def prune(self) -> None:
        assert self._growth is not None, "a tree must be planted first"
        self._growth.prune(self.found)

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
        return self._batch(tokens, positions, slots, self._starts, longest)

    def _lay_out_draft(self) -> DeviceBatch:
        """Lay out the rows of the verification: the last committed token of each seat and its chain or tree."""
        rows, longest = self._bucket.rows, self._bucket.longest
        if not self.tree:
            return self._lay_out(self._counts, first=-1, rows=rows, longest=1 + longest)
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
            ancestors=self._ancestors[:rows],
            pdl=self._pdl,
        )
        batch = self._batch(tokens, positions, slots, self._starts, 1 + longest)
        return replace(batch, bases=self._bases, tails=tails, leads=leads)

    def _batch(self, tokens: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, longest: int) -> DeviceBatch:
        return DeviceBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            row_starts=starts,
            page_table=self.state.pages,
            lanes=self._asked[0],
            seats=self._bucket.seats,
            max_rows=longest,
            max_context=self._bucket.context,
        )

    def _stamp(self, index: int) -> None:
        if self._stamps is not None and self._stamps.is_cuda:
            stamp(self._stamps, index, pdl=self._pdl)


def _host_memory(like: Tensor) -> deque[Tensor]:
    """Make memory of the host for each step in flight, in one piece: each that a device can reach takes long."""
    pinned = like.device.type == "cuda"
    return deque(torch.zeros((MAX_IN_FLIGHT, *like.shape), dtype=like.dtype, pin_memory=pinned).unbind())


def on_cuda(model: Forward) -> CudaForward:
    """Check that rounds on a CUDA device can run a drafter's model."""
    if not isinstance(model, CudaForward):
        raise TypeError(f"rounds on a CUDA device run models that are CudaForwards, not {type(model).__name__}")
    return model
