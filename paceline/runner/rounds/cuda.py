"""Rounds on a CUDA device: all draft passes, the verification, acceptance and bookkeeping as one graph, replayed.

A graph belongs to a bucket of rounds (`runner.rounds.buckets`). Up to `MAX_GRAPHS` are kept; the least recently used
one is dropped. The graph of plain decoding launches no draft. Verification is ragged: the graph has a fixed
number of rows in all, and shorter drafts leave room for longer ones.

The host uploads changes (mostly none), replays the graph, and starts a copy of the outcome to its own memory. Only
`collect` waits. Prompts are read by launches outside of graphs: their passes take longer than their launches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.rounds.buckets import Bucket, Choice, context_bound, draft_length, draft_rows, seat_count
from paceline.runner.rounds.cuda_chunks import ChunkReader
from paceline.runner.rounds.cuda_round import CudaRound, on_cuda
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import (
    Chunk,
    DeviceDrafter,
    Landed,
    Seat,
    Times,
    longest_draft,
    read_landed,
    taps_of,
)
from paceline.runner.rounds.upload import Upload
from paceline.sampling.sampler import Sampler

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
    tree: bool = False  # drafts are trees


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
        self.drafters: Mapping[str, DeviceDrafter] = dict(drafters or {})
        self.tapping: Collection[str] = [name for name, by in self.drafters.items() if taps_of(by)]
        readers = {name: on_cuda(by.reader) for name, by in self.drafters.items() if by.reader is not None}
        self.readers: Collection[str] = readers.keys()
        self.max_draft = max_draft
        self.synthetic_acceptance = 0.0
        self._target = target
        self._graphs = graphs
        self._max_context = max_context
        device = target.decoder.device
        width = max_context + max_draft + 2
        scratch = target.kv.scratch_page
        self._state = DeviceState(lanes=lanes, width=width, scratch_page=scratch, device=device, max_draft=max_draft)
        self._changes = Changes(self._state, vocab_size=target.vocab_size)
        self._upload = Upload(device)
        self._held = {name: self._no_states(self.drafters[name]) for name in self.tapping}  # by drafter
        self._read = ChunkReader(target, self._state, self._upload)
        self._filtered: set[int] = set()  # lanes that filter logits
        self._captured: dict[Bucket, CudaRound] = {}  # least recently used first
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
        by, held = self.drafters.get(drafter or ""), self._held.get(drafter or "")
        prompts = self._read(chunks, by, held, self._context(context))
        outcomes, stamps = round(seats) if round else (None, None)
        if done:
            done.record()
        asked = sum(min(seat.max_draft, bucket.draft) for seat in seats) if bucket else 0
        tree = round is not None and round.tree
        return Ticket(chunks, len(seats), bucket, prompts, outcomes, stamps, began, done, asked, tree)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        times = Times()
        if ticket.began is not None and ticket.done is not None:
            ticket.done.synchronize()
            times = Times(step=ticket.began.elapsed_time(ticket.done) / 1e3)
        drawn = iter([] if ticket.prompts is None else [read_landed(row) for row in ticket.prompts.tolist()])
        landed_chunks = [next(drawn) if chunk.draws else None for chunk in ticket.chunks]
        landed: list[Landed] = []
        if ticket.bucket is not None and ticket.outcomes is not None:
            landed = [read_landed(row, tree=ticket.tree) for row in ticket.outcomes[: ticket.seats].tolist()]
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

    def _no_states(self, drafter: DeviceDrafter) -> HeldStates:
        decoder = self._target.decoder
        return HeldStates.empty(
            lanes=self._state.dummy,
            capacity=1 + longest_draft(drafter, self.max_draft),
            width=len(taps_of(drafter)) * decoder.config.hidden_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def _events(self) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        if self._state.device.type != "cuda":
            return None, None
        return _event(), _event()

    def _apply_changes(self) -> None:
        if self._changes:
            places, values = self._changes.take()
            self._state.memory[self._upload(places)] = self._upload(values)

    def _bucket(self, seats: Sequence[Seat], drafter: str | None, context: int) -> Bucket:
        draft = draft_length(max(seat.max_draft for seat in seats))
        count = seat_count(len(seats))
        wanted = sum(min(seat.max_draft, draft) for seat in seats)
        if drafter is not None and self.drafters[drafter].finds_fewer:
            wanted = int(wanted * min(1.0, FOUND_MARGIN * self._found[drafter])) + 1
        bucket = Bucket(
            seats=count,
            rows=count + draft_rows(wanted, most=count * draft),
            draft=draft,
            drafter=drafter if draft or drafter in self._held else None,
            context=self._context(context),
            filters=any(seat.lane in self._filtered for seat in seats),
        )
        return self._choice.choose(bucket, self._captured)

    def _context(self, context: int) -> int:
        return context_bound(context, most=self._max_context + self.max_draft + 2)

    def _round(self, bucket: Bucket) -> CudaRound:
        made = self._captured.pop(bucket, None) or self._capture(bucket)
        self._captured[bucket] = made  # most recently used last
        return made

    def _capture(self, bucket: Bucket) -> CudaRound:
        if len(self._captured) >= MAX_GRAPHS:
            self._drop_oldest()
        by = self.drafters[bucket.drafter] if bucket.drafter is not None else None
        held = self._held.get(bucket.drafter or "")
        made = CudaRound(bucket, self._state, self._target, by, held, self.synthetic_acceptance)
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
            seconds = self._seconds[bucket.draft, bucket.drafter if bucket.draft else None]
            seconds[bucket.seats] = times.step + DECAY * (seconds.get(bucket.seats, times.step) - times.step)
        if bucket.drafter is not None and ticket.asked:
            share = sum(len(one.drafted) for one in landed) / ticket.asked
            self._found[bucket.drafter] = share + DECAY * (self._found[bucket.drafter] - share)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types


def _parts(step: float, stamps: Sequence[int]) -> Times:
    draft, verify, accepting = (max(after - before, 0) / 1e9 for before, after in itertools.pairwise(stamps))
    return Times(step=step, draft=draft, verify=verify, accept=accepting)
