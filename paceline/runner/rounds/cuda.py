"""Rounds on a CUDA device: all draft passes, the verification, acceptance and bookkeeping as one graph, replayed.

A graph belongs to a bucket of rounds (`runner.rounds.buckets`). Up to `MAX_GRAPHS` are kept; the least recently used
one is dropped. The graph of plain decoding launches no draft. Verification is ragged: the graph has a fixed
number of rows in all, and shorter drafts leave room for longer ones.

The host uploads changes (mostly none), replays the graph, and starts a copy of the outcome to its own memory. Only
`collect` waits. Prompts are read by launches outside of graphs: their passes take longer than their launches.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cuda import score
from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.rounds.buckets import (
    Bucket,
    Choice,
    context_bound,
    draft_length,
    draft_rows,
    offer_length,
    seat_count,
)
from paceline.runner.rounds.cuda_chunks import ChunkReader, ReadChunks
from paceline.runner.rounds.cuda_round import CudaRound, on_cuda
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Seat, Times, held_by, read_landed, taps_of
from paceline.runner.rounds.scores import Scorer, SeatScores
from paceline.runner.rounds.upload import Upload
from paceline.sampling.sampler import Sampler

MAX_GRAPHS = 256  # graphs kept at a time
DECAY = 0.9  # weight of the past in running averages of times and drafts
FOUND_MARGIN = 1.5  # factor: rows reserved for found tokens = this × their average
OFFERED = "the host's offers"  # stands for the drafter of seats with an offer


@dataclass(frozen=True, slots=True)
class Ticket:
    chunks: Sequence[Chunk]
    seats: Sequence[Seat]
    bucket: Bucket | None
    read: ReadChunks  # outcomes of chunks
    outcomes: Tensor | None  # outcomes of seats, in the host's memory
    stamps: Tensor | None
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None
    scores: SeatScores | None = None
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
        readers = {name: on_cuda(by.reader) for name, by in self.drafters.items() if by.reader is not None}
        self.readers: Collection[str] = readers.keys()
        self.tapping: Collection[str] = [name for name, by in self.drafters.items() if taps_of(by)]
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
        self._scorer = Scorer(self._state, self._upload, score, pdl=target.decoder.pdl)
        self._held = {name: self._no_states(self.drafters[name]) for name in self.tapping}  # by drafter
        self._read = ChunkReader(target, self._state, self._upload, self._scorer)
        self._filtered: set[int] = set()  # lanes that filter logits
        self._edited: set[int] = set()  # lanes that edit logits
        self._captured: dict[Bucket, CudaRound] = {}  # least recently used first
        self._choice = Choice()
        # (draft length, drafter) → number of seats → seconds of a round
        self._seconds: dict[tuple[int, str | None], dict[int, float]] = defaultdict(dict)
        self._found: dict[str, float] = defaultdict(lambda: 1.0)  # drafter → found tokens / allowed tokens
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        self._changes.write(lane, tokens, sampler)
        self._scorer.write(lane, sampler)
        (self._filtered.add if sampler.params.filters else self._filtered.discard)(lane)
        (self._edited.add if sampler.params.edits_logits else self._edited.discard)(lane)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    def set_mask(self, lane: int, bits: np.ndarray, *, sure: int = 0) -> None:
        self._changes.set_mask(lane, bits, sure=sure)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        began, done = self._events()
        bucket = self._bucket(seats, drafter, context) if seats else None
        round = self._round(bucket) if bucket else None  # may capture a graph, which must not be timed
        self._changes.apply(self._upload)
        if began:
            began.record()
        edits = any(chunk.lane in self._edited for chunk in chunks)
        by, held = self.drafters.get(drafter or ""), self._held.get(drafter or "")
        read = self._read(chunks, by, held, self._context(context), edits=edits)
        outcomes, stamps = round(seats) if round else (None, None)
        verified = round.verified if round else None
        scores = self._scorer.score_seats([seat.lane for seat in seats], verified) if verified else None
        if done:
            done.record()
        tree = round is not None and round.tree
        return Ticket(chunks, seats, bucket, read, outcomes, stamps, began, done, scores, tree)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        times = Times()
        if ticket.began is not None and ticket.done is not None:
            ticket.done.synchronize()
            times = Times(step=ticket.began.elapsed_time(ticket.done) / 1e3)
        landed_chunks = ticket.read.landed(ticket.chunks)
        landed: list[Landed] = []
        if ticket.bucket is not None and ticket.outcomes is not None:
            rows = ticket.outcomes[: len(ticket.seats)].tolist()
            landed = [read_landed(row, tree=ticket.tree) for row in rows]
            self._learn(ticket, landed, times)
            if ticket.scores is not None:
                ticket.scores.attach(landed)
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
            capacity=held_by(drafter, self.max_draft),
            width=len(taps_of(drafter)) * decoder.config.hidden_size,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def _events(self) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        if self._state.device.type != "cuda":
            return None, None
        return _event(), _event()

    def _bucket(self, seats: Sequence[Seat], drafter: str | None, context: int) -> Bucket:
        by_drafter = [seat.max_draft for seat in seats if seat.offer is None]
        by_host = [seat.max_draft for seat in seats if seat.offer is not None]
        draft = draft_length(max(by_drafter, default=0))
        offers = offer_length(max(by_host, default=0), most=self.max_draft)
        count = seat_count(len(seats))
        wanted = self._expected(drafter, sum(min(length, draft) for length in by_drafter))
        wanted += self._expected(OFFERED, sum(by_host))
        edits = any(seat.lane in self._edited for seat in seats)
        bucket = Bucket(
            seats=count,
            rows=count + draft_rows(wanted, most=count * max(draft, offers)),
            draft=draft,
            drafter=drafter if draft or drafter in self._held else None,
            context=self._context(context),
            filters=edits or any(seat.lane in self._filtered for seat in seats),
            offers=offers,
            edits=edits,
        )
        return self._choice.choose(bucket, self._captured)

    def _expected(self, drafter: str | None, allowed: int) -> int:
        """Return how many rows to reserve for drafts of at most `allowed` tokens in all."""
        if not allowed or drafter is None or (drafter != OFFERED and not self.drafters[drafter].finds_fewer):
            return allowed
        return min(int(allowed * FOUND_MARGIN * self._found[drafter]) + 1, allowed)

    def _context(self, context: int) -> int:
        return context_bound(context, most=self._max_context + self.max_draft + 2)

    def _round(self, bucket: Bucket) -> CudaRound:
        made = self._captured.pop(bucket, None) or self._capture(bucket)
        self._captured[bucket] = made  # most recently used last
        return made

    def _capture(self, bucket: Bucket) -> CudaRound:
        if len(self._captured) >= MAX_GRAPHS:
            self._drop_oldest()
        by, held = self.drafters.get(bucket.drafter or ""), self._held.get(bucket.drafter or "")
        synthetic = self.synthetic_acceptance
        made = CudaRound(bucket, self._state, self._target, by, held, synthetic, max_draft=self.max_draft)
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
        if not ticket.chunks and not bucket.offers and times.step:
            seconds = self._seconds[bucket.draft, bucket.drafter if bucket.draft else None]
            seconds[bucket.seats] = times.step + DECAY * (seconds.get(bucket.seats, times.step) - times.step)
        if not bucket.longest:
            return
        allowed, found = Counter[str](), Counter[str]()
        for seat, one in zip(ticket.seats, landed, strict=True):
            drafter = bucket.drafter or "" if seat.offer is None else OFFERED
            allowed[drafter] += min(seat.max_draft, bucket.draft if seat.offer is None else bucket.offers)
            found[drafter] += len(one.drafted)
        for drafter, tokens in allowed.items():
            if tokens:
                share = found[drafter] / tokens
                self._found[drafter] = share + DECAY * (self._found[drafter] - share)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types


def _parts(step: float, stamps: Sequence[int]) -> Times:
    draft, verify, accepting = (max(after - before, 0) / 1e9 for before, after in itertools.pairwise(stamps))
    return Times(step=step, draft=draft, verify=verify, accept=accepting)
