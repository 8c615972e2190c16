"""Rounds on a CUDA device: all draft passes, the verification, acceptance and bookkeeping as one graph, replayed.

A graph belongs to a bucket of rounds (`runner.rounds.buckets`). Up to `MAX_GRAPHS` are kept; the least recently used
one is dropped. The graph of plain decoding launches no draft. Verification is ragged: the graph has a fixed
number of rows in all, and shorter drafts leave room for longer ones.

The host uploads changes (mostly none), replays the graph, and starts a copy of the outcome to its own memory. Only
`collect` waits. Prompts are read by launches outside of graphs: their passes take longer than their launches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.kernels.cuda.clock import stamp
from paceline.kernels.cuda.lookup import lookup
from paceline.kernels.cuda.rounds import accept, layout
from paceline.kernels.cuda.sample import draw
from paceline.runner.forwards.cuda import CudaForward, DeviceBatch, padded_rows
from paceline.runner.rounds.buckets import Bucket, Choice, context_bound, draft_length, draft_rows, seat_count
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Seat, Times, read_landed
from paceline.sampling.sampler import Sampler

MAX_IN_FLIGHT = 4  # steps with memory for outcomes; the engine has fewer in flight
MAX_GRAPHS = 256  # graphs kept at a time
DECAY = 0.9  # weight of the past in running averages of times and drafts
FOUND_MARGIN = 1.5  # factor: rows reserved for found tokens = this × their average


@dataclass(frozen=True, slots=True)
class Ticket:
    chunks: Sequence[Chunk]
    seats: int
    bucket: Bucket | None
    prompts: Tensor | None  # outcomes of chunks that draw, in the host's memory
    outcomes: Tensor | None  # outcomes of seats, in the host's memory
    stamps: Tensor | None
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None
    asked: int = 0  # drafted tokens that the seats allow


class CudaRounds:
    """Implements Rounds with Triton kernels and CUDA graphs. Models of drafters must be `CudaForward`s."""

    def __init__(
        self,
        target: CudaForward,
        *,
        lanes: int,
        max_context: int,
        max_draft: int,
        drafters: Mapping[str, DeviceDrafter] | None = None,
        graphs: bool = True,
    ) -> None:
        self._drafters = dict(drafters or {})
        self.drafters: Collection[str] = self._drafters.keys()
        readers = {name: _on_cuda(by.reader) for name, by in self._drafters.items() if by.reader is not None}
        self.readers: Collection[str] = readers.keys()
        self.max_draft = max_draft
        self.synthetic_acceptance = 0.0
        self._target = target
        self._graphs = graphs
        self._max_context = max_context
        device = target.decoder.device
        width = max_context + max_draft + 2
        self._state = DeviceState(lanes=lanes, width=width, scratch_page=target.kv.scratch_page, device=device)
        self._changes = Changes(self._state, vocab_size=target.vocab_size)
        self._filtered: set[int] = set()  # lanes that filter logits
        self._captured: dict[Bucket, _Round] = {}  # least recently used first
        self._choice = Choice()
        # (draft length, drafter) → number of seats → seconds of a round
        self._seconds: dict[tuple[int, str | None], dict[int, float]] = defaultdict(dict)
        self._found: dict[str, float] = defaultdict(lambda: 1.0)  # drafter → found tokens / allowed tokens
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        self._changes.write(lane, tokens, sampler)
        (self._filtered.add if sampler.params.filters else self._filtered.discard)(lane)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        began, done = self._events()
        bucket = self._bucket(seats, drafter, context) if seats else None
        round = self._round(bucket) if bucket else None  # may capture a graph, which must not be timed
        self._apply_changes()
        if began:
            began.record()
        prompts = self._read(chunks, drafter, context)
        outcomes, stamps = round(seats) if round else (None, None)
        if done:
            done.record()
        asked = sum(min(seat.max_draft, bucket.draft) for seat in seats) if bucket else 0
        return Ticket(chunks, len(seats), bucket, prompts, outcomes, stamps, began, done, asked)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        times = Times()
        if ticket.began is not None and ticket.done is not None:
            ticket.done.synchronize()
            times = Times(step=ticket.began.elapsed_time(ticket.done) / 1e3)
        drawn = iter([] if ticket.prompts is None else [read_landed(row) for row in ticket.prompts.tolist()])
        landed_chunks = [next(drawn) if chunk.draws else None for chunk in ticket.chunks]
        landed: list[Landed] = []
        if ticket.bucket is not None and ticket.outcomes is not None:
            landed = [read_landed(row) for row in ticket.outcomes[: ticket.seats].tolist()]
            self._learn(ticket, landed, times)
            if ticket.stamps is not None:
                times = _parts(times.step, ticket.stamps.tolist())
            elif not ticket.chunks:
                times = Times(step=times.step, verify=times.step)
        return landed_chunks, landed, times

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        known = self._seconds[draft, drafter if draft else None]
        near = [(abs(seats - batch), seconds) for seats, seconds in known.items() if abs(seats - batch) <= batch // 4]
        return min(near)[1] if near else None

    def _events(self) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        if self._state.device.type != "cuda":
            return None, None
        return _event(), _event()

    def _apply_changes(self) -> None:
        if self._changes:
            places, values = self._changes.take()
            self._state.memory[self._up(places)] = self._up(values)

    def _up(self, values: np.ndarray) -> Tensor:
        """Copy values to the device without waiting."""
        tensor = torch.from_numpy(values)
        if self._state.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._state.device, non_blocking=True)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return self._up(np.array(values, dtype=np.int32))

    # ── prompts ──

    def _read(self, chunks: Sequence[Chunk], drafter: str | None, context: int) -> Tensor | None:
        """Run passes over prompt chunks, and draw the first token after each prompt that ends here."""
        along = [chunk for chunk in chunks if chunk.drafts]
        reading = [chunk for chunk in chunks if chunk.target]
        by = self._drafters.get(drafter or "")
        if along and by is not None and by.reader is not None:
            reader = _on_cuda(by.reader)
            reader.decoder.fill(self._chunk_rows(along, [], context), reader.kv)
        if not reading:
            return None
        ends = itertools.accumulate(chunk.count for chunk in reading)
        outs = [end - 1 for chunk, end in zip(reading, ends, strict=True) if chunk.draws]
        rows = self._chunk_rows(reading, outs, context)
        if not outs:
            self._target.decoder.fill(rows, self._target.kv)
            return None
        lanes = self._ints([chunk.lane for chunk in reading if chunk.draws])
        targets = torch.empty_like(lanes)
        pdl = self._target.decoder.pdl
        draw(self._target.decoder.logits(rows, self._target.kv), self._state, lanes=lanes, out=targets, pdl=pdl)
        out = torch.zeros((len(lanes), 4), dtype=torch.int32, device=lanes.device)
        accept(self._state, seats=lanes, targets=targets, out=out, roots=self._ints(range(len(lanes))), pdl=pdl)
        return self._down(out, torch.empty(out.shape, dtype=torch.int32, pin_memory=out.is_cuda))

    def _chunk_rows(self, chunks: Sequence[Chunk], outs: Sequence[int], context: int) -> DeviceBatch:
        state, counts = self._state, [chunk.count for chunk in chunks]
        lanes = self._ints([chunk.lane for chunk in chunks])
        padding = padded_rows(sum(counts)) - sum(counts)
        places = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        owners = self._up(np.repeat([*(chunk.lane for chunk in chunks), state.dummy], [*counts, padding]))
        positions = self._up(np.concatenate([*places, np.zeros(padding, dtype=np.int64)]))
        return DeviceBatch(
            tokens=state.tokens[owners, positions],
            positions=positions.int(),
            slots=state.pages[owners, positions // PAGE_SIZE] * PAGE_SIZE + (positions % PAGE_SIZE).int(),
            row_starts=self._ints([0, *itertools.accumulate(counts)]),
            page_table=state.pages,
            lanes=lanes,
            seats=len(chunks),
            max_rows=max(counts),
            max_context=self._context(context),
            logit_rows=self._up(np.array(outs, dtype=np.int64)),
        )

    # ── rounds ──

    def _bucket(self, seats: Sequence[Seat], drafter: str | None, context: int) -> Bucket:
        draft = draft_length(max(seat.max_draft for seat in seats))
        count = seat_count(len(seats))
        wanted = sum(min(seat.max_draft, draft) for seat in seats)
        if drafter is not None and self._drafters[drafter].finds_fewer:
            wanted = int(wanted * min(1.0, FOUND_MARGIN * self._found[drafter])) + 1
        bucket = Bucket(
            seats=count,
            rows=count + draft_rows(wanted, most=count * draft),
            draft=draft,
            drafter=drafter if draft else None,
            context=self._context(context),
            filters=any(seat.lane in self._filtered for seat in seats),
        )
        return self._choice.choose(bucket, self._captured)

    def _context(self, context: int) -> int:
        return context_bound(context, most=self._max_context + self.max_draft + 2)

    def _round(self, bucket: Bucket) -> _Round:
        made = self._captured.pop(bucket, None) or self._capture(bucket)
        self._captured[bucket] = made  # most recently used last
        return made

    def _capture(self, bucket: Bucket) -> _Round:
        if len(self._captured) >= MAX_GRAPHS:
            self._drop_oldest()
        by = self._drafters[bucket.drafter] if bucket.drafter is not None else None
        made = _Round(bucket, self._state, self._target, by, self.synthetic_acceptance)
        if self._graphs:
            made.capture(self._pool)
        return made

    def _drop_oldest(self) -> None:
        """Drop the least recently used graph. Waits for the device first, because a step in flight may replay it."""
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        del self._captured[next(iter(self._captured))]

    def _learn(self, ticket: Ticket, landed: Sequence[Landed], times: Times) -> None:
        bucket = ticket.bucket
        assert bucket is not None
        if not ticket.chunks and times.step:
            seconds = self._seconds[bucket.draft, bucket.drafter]
            seconds[bucket.seats] = times.step + DECAY * (seconds.get(bucket.seats, times.step) - times.step)
        if bucket.drafter is not None and ticket.asked:
            share = sum(len(one.drafted) for one in landed) / ticket.asked
            self._found[bucket.drafter] = share + DECAY * (self._found[bucket.drafter] - share)

    def _down(self, source: Tensor, memory: Tensor) -> Tensor:
        """Start a copy to the host's memory; it is valid once the step is done."""
        return memory.copy_(source, non_blocking=True)


class _Round:
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
        self._out = torch.zeros((seats, 2 + 2 * (bucket.draft + 1)), dtype=torch.int32, device=device)
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
        rows = self._lay_out(self._counts, first=-1, rows=bucket.rows, longest=1 + bucket.draft)
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
        accept(
            state,
            seats=self._asked[0],
            targets=targets,
            out=self._out,
            row_starts=self._starts,
            synthetic_acceptance=self._synthetic_acceptance,
            pdl=pdl,
        )
        self._stamp(3)

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
        forward = _on_cuda(model)
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

    def _stamp(self, index: int) -> None:
        if self._stamps is not None and self._stamps.is_cuda:
            stamp(self._stamps, index, pdl=self._pdl)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types


def _parts(step: float, stamps: Sequence[int]) -> Times:
    draft, verify, accepting = (max(after - before, 0) / 1e9 for before, after in itertools.pairwise(stamps))
    return Times(step=step, draft=draft, verify=verify, accept=accepting)


def _on_cuda(model: Forward) -> CudaForward:
    """Check that rounds on a CUDA device can run a drafter's model."""
    if not isinstance(model, CudaForward):
        raise TypeError(f"rounds on a CUDA device run models that are CudaForwards, not {type(model).__name__}")
    return model
