"""Rounds on a CUDA device: all draft passes, the verification, acceptance and bookkeeping as one graph, replayed.

A graph belongs to a bucket of rounds (`runner.rounds.buckets`), and `runner.rounds.graphs` chooses one for each step.
The graph of plain decoding launches no draft. Verification is ragged: the graph has a fixed number of rows in all, and
shorter drafts leave room for longer ones.

The host uploads changes (mostly none), replays the graph, and starts a copy of the outcome to its own memory. A round
with grammars is three graphs: draft, verification and draw. Only `drafts`, `wait` and `collect` wait. Prompts are read
by launches outside of graphs. Passes over long ones take longer than their launches; short ones wait for each other
(`engine.gathering`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from paceline.kernels.cuda import score
from paceline.kernels.cuda.compiling import compiling, rehearsal
from paceline.kernels.cuda.ways import without_comparing
from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.rounds import dummies
from paceline.runner.rounds.batch_times import BatchTimes
from paceline.runner.rounds.buckets import TOPS, Bucket, Grid
from paceline.runner.rounds.cuda_chunks import NOTHING_READ, ChunkReader, ReadChunks
from paceline.runner.rounds.cuda_draft import on_cuda
from paceline.runner.rounds.cuda_round import CudaRound
from paceline.runner.rounds.cuda_ticket import Ticket
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.graphs import Graphs, Prepared
from paceline.runner.rounds.marks import Marks
from paceline.runner.rounds.parameter_kernels import compile_parameters
from paceline.runner.rounds.protocol import NOTHING, Chunk, DeviceDrafter, Landed, Seat, Times, read_all, tell_matches
from paceline.runner.rounds.recorder import Recorder
from paceline.runner.rounds.rules import Judge
from paceline.runner.rounds.scores import Scorer
from paceline.runner.rounds.traits import (
    drafter_of,
    drafts_trees,
    head_of,
    held_for,
    network_of,
    passed_length,
    reads_prediction,
    taps_of,
)
from paceline.runner.rounds.upload import MaskTables, Upload, first_masks
from paceline.runner.rounds.wanted import OFFERED, WantedBuckets, drafts_of, looks_up
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet

logger = logging.getLogger(__name__)
START_SECONDS = 10.0  # time for recording the graphs of the start; the others follow in idle moments
SPARE_BYTES = 512 << 20  # device memory that graphs leave free
Chosen = tuple[Bucket, CudaRound, bool]
"""The round that runs a step, its bucket, and whether it takes its usual time: it was not recorded just now."""


class CudaRounds:
    """Implements Rounds with Triton kernels and CUDA graphs. Models of drafters must be `CudaForward`s."""

    def __init__(
        self,
        target: CudaForward,
        *,
        lanes: int,
        max_context: int,
        max_draft: int,
        max_draft_tokens: int | None = None,
        drafters: Mapping[str, DeviceDrafter] | None = None,
        graphs: bool = True,
    ) -> None:
        """`max_draft_tokens`: drafted tokens of a round that the start prepares for; None: as many as all lanes can
        have. `graphs` False: rounds are never recorded."""
        self.drafters: Mapping[str, DeviceDrafter] = dict(drafters or {})
        readers = {name: on_cuda(by.reader) for name, by in self.drafters.items() if by.reader is not None}
        self.readers: Collection[str] = readers.keys()
        self.tapping: Collection[str] = [name for name, by in self.drafters.items() if taps_of(by)]
        self._holders = [name for name in self.tapping if network_of(name, self.drafters) == name]
        self.max_draft = max_draft
        self.timed = target.decoder.device.type == "cuda"
        self.synthetic_acceptance = 0.0
        self.judge: Judge | None = None
        self._target = target
        device = target.decoder.device
        width = max_context + max_draft + 2
        drafted = lanes * max_draft if max_draft_tokens is None else max_draft_tokens
        self._grid = Grid(lanes=lanes, longest=width, max_draft=max_draft, max_drafted=drafted)
        self._recorder = Recorder(device) if graphs else None
        self._graphs = Graphs(self._make, has_room=self._has_room)
        scratch = target.kv.scratch_page
        self._state = DeviceState(
            lanes=lanes,
            width=width,
            scratch_page=scratch,
            device=device,
            max_draft=max_draft,
            holding=len(self._holders),
            predicts=any(reads_prediction(by) for by in self.drafters.values()),
        )
        self._changes = Changes(self._state, vocab_size=target.vocab_size)
        self._upload = Upload(device)
        self._scorer = Scorer(self._state, score, pdl=target.decoder.pdl)
        tables = zip(self._holders, self._state.held, strict=True)
        held = {name: self._no_states(name, table) for name, table in tables}
        self._held = {name: held[network_of(name, self.drafters)] for name in self.tapping}  # by drafter
        self._read = ChunkReader(target, self._state, self._upload, self._scorer)
        self._wanted = WantedBuckets(self._grid, self.drafters, self._scorer, vocab_size=target.vocab_size)
        self._masks = MaskTables(target.vocab_size, device)
        self._mark: Callable[[], torch.cuda.Event | None] = Marks(device) if self.timed else lambda: None
        self._late: Ticket | None = None  # a step whose masks are there and not sent yet
        # (draft length, drafter) → seconds of its rounds
        self._seconds: dict[tuple[int, str | None], BatchTimes] = defaultdict(BatchTimes)

    @torch.inference_mode()
    def prepare(
        self,
        longest: Mapping[str, int],
        *,
        offers: int = 0,
        prompt_rows: int,
        seconds: float = START_SECONDS,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> Prepared | None:
        """Compile the kernels of rounds and prompts, and record the graphs that traffic will need, for about `seconds`.

        `longest`: tokens of a draft, by drafter; `offers`: of one that the host makes. `prompt_rows`: rows of a step,
        at most. `report` gets the number of graphs recorded so far, and of those that the start is to have. None:
        rounds are never recorded."""
        if self._recorder is None:
            return None
        with self._target.decoder.alone():
            return self._prepare(longest, offers, prompt_rows, seconds, report)

    def _prepare(
        self,
        longest: Mapping[str, int],
        offers: int,
        prompt_rows: int,
        seconds: float,
        report: Callable[[int, int], None],
    ) -> Prepared:
        began, free = time.perf_counter(), self._free_bytes()
        known = [*drafts_of(self.drafters, self._grid, longest)]
        with compiling():
            for bucket in self._grid.samples(known):
                self._make(bucket).run_once()
            self._read_dummies(prompt_rows, self._grid.contexts())
            trees, vocab = any(drafts.whole for _, drafts in known), self._target.vocab_size
            heads = {len(head.ids) for by in self.drafters.values() if (head := head_of(by)) is not None}
            compile_parameters(self._state, vocab=vocab, heads=heads, trees=trees, pdl=self._target.decoder.pdl)
        self._read_dummies(prompt_rows)
        self._change_dummies()
        torch.cuda.synchronize(self._state.device)
        compiled = time.perf_counter()
        buckets = [*self._grid.start(known, offers=offers, scores=self._start_scores())]
        self._graphs.start(buckets, seconds=seconds, needed=self._grid.needed(buckets), report=report)
        prepared = Prepared(
            graphs=len(self._graphs),
            record_seconds=time.perf_counter() - compiled,
            compile_seconds=compiled - began,
            bytes=free - self._free_bytes(),
        )
        logger.info("graphs: %s", prepared)
        return prepared

    def improve(self) -> bool:
        bucket = self.missing()
        if bucket is not None:
            self.record(bucket)
        return bucket is not None

    def missing(self) -> Bucket | None:
        """Return the bucket whose round is to be recorded in the next idle moment; None: there is none."""
        return None if self._recorder is None else self._graphs.missing()

    @torch.inference_mode()
    def record(self, bucket: Bucket) -> None:
        """Record the round of a bucket, in a moment in which nothing is in flight."""
        with self._target.decoder.alone():
            self._graphs.add(bucket)

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        self._changes.write(lane, tokens, sampler, prediction)
        self._wanted.write(lane, sampler)

    def cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        held = {network_of(name, self.drafters): count for name, count in unread.items()}
        self._changes.cut(lane, tokens, sampler, [held.get(name, 0) for name in self._holders])

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    @torch.inference_mode()
    def launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        *,
        drafter: str | None,
        context: int,
        masked: Sequence[int] = (),
        chosen: Chosen | None = None,
    ) -> Ticket:
        """`chosen`: the round, where another than the best one is to run."""
        if seats and chosen is None:
            chosen = self.choose(seats, drafter, context, masked)
        bucket, round, typical = chosen or (None, None, True)
        self._end_late()
        self._changes.apply(self._upload)
        began = self._mark()
        read = self._read_chunks(chunks, drafter, context) if chunks else NOTHING_READ
        replayed = round is None or round.recorded or self._recorder is None
        ticket = Ticket(
            chunks, seats, bucket, round, read, began, typical and replayed, self._mark() if chunks else None
        )
        ticket.masked_seats = masked
        if round is not None:
            round.begin(seats)
        if round is not None and bucket is not None and bucket.masks:
            self._verify(ticket, round)
        else:
            self._end(ticket)
        return ticket

    def choose(self, seats: Sequence[Seat], drafter: str | None, context: int, masked: Sequence[int]) -> Chosen:
        """Choose the round for a step of these seats; it may be recorded for that. In inference mode."""
        recorded = len(self._graphs)
        bucket, round = self._graphs.find(self._wanted.find(seats, drafter, context, masks=bool(masked)))
        return bucket, round, len(self._graphs) == recorded

    def chosen(self, bucket: Bucket) -> Chosen:
        """Return the round of a bucket that another rank has chosen. In inference mode."""
        return bucket, self._graphs.round_of(bucket), True

    @without_comparing()
    def _read_chunks(self, chunks: Sequence[Chunk], drafter: str | None, context: int) -> ReadChunks:
        drawn = [chunk.mask for chunk in chunks if chunk.target and chunk.draws]
        masks = first_masks(drawn, self._upload, vocab_size=self._target.vocab_size)
        return self._read(
            chunks,
            self.drafters.get(drafter or ""),
            self._held.get(drafter or ""),
            self._grid.context(context),
            edits=masks is not None or self._wanted.edits([chunk.lane for chunk in chunks]),
            masks=masks,
        )

    def _verify(self, ticket: Ticket, round: CudaRound) -> None:
        """Launch all that needs no masks."""
        if ticket.bucket is not None and ticket.bucket.longest:
            ticket.laid, ticket.ancestors = round.draft()
            ticket.drafted = self._mark()
        round.verify()
        ticket.verified = self._mark()

    def _end(self, ticket: Ticket) -> None:
        """Launch what is left of a step."""
        if ticket.round is not None:
            ticket.outcome = ticket.round.end()
            ticket.states = ticket.round.tapped_states()
        ticket.done = self._mark()

    def drafts(self, ticket: Ticket) -> Mapping[int, Sequence[Branch]]:
        if ticket.drafted is not None:
            ticket.drafted.synchronize()
        return ticket.drafts()

    def sheet(self, ticket: Ticket) -> MaskSheet:
        assert ticket.round is not None, "a step without a round has nothing to draw"
        ticket.sheet = ticket.round.sheet()
        return ticket.sheet

    def draw(self, ticket: Ticket, drawing: Collection[int]) -> None:
        assert ticket.round is not None, "a step without a round has nothing to draw"
        if len(drawing) < len(ticket.masked_seats):
            ticket.void = [index for index in ticket.masked_seats if index not in drawing]
        self._late = ticket
        waits = ticket.verified is None or ticket.verified.query()  # type: ignore[no-untyped-call]  # torch's
        if waits or not ticket.round.recorded:  # one that is not may be recorded before the next launch
            self._end_late()

    def _end_late(self) -> None:
        """Send the masks of a step that has them. As long as the device verifies, this waits for the next launch, so
        that the device has work behind the draw."""
        ticket, self._late = self._late, None
        if ticket is not None and ticket.round is not None and ticket.sheet is not None:
            with torch.inference_mode():
                ticket.round.mask(ticket.sheet, ticket.void)
                ticket.masked = self._mark()
                self._end(ticket)

    def wait(self, ticket: Ticket) -> None:
        if ticket is self._late:
            self._end_late()
        if ticket.done is not None and not ticket.ended:
            ticket.done.synchronize()
            ticket.ended = True

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        self.wait(ticket)
        assert ticket.bucket is None or ticket.outcome is not None, "a step waits for its masks"
        times = Times(step=ticket.seconds(), typical=ticket.typical)
        landed_chunks = ticket.read.landed(ticket.chunks)
        landed: list[Landed] = []
        bucket, outcome = ticket.bucket, ticket.outcome
        if bucket is not None and outcome is not None:
            landed = read_all(outcome.reports[: len(ticket.seats)].tolist(), tree=ticket.tree)
            for index in ticket.void:
                landed[index] = NOTHING
            if outcome.matches is not None:
                tell_matches(landed, ticket.seats, outcome.matches.tolist())
            self._learn(ticket, landed, times)
            if outcome.scores is not None:
                lanes = [seat.lane for seat in ticket.seats]
                self._scorer.read(lanes, outcome.scores, steps=1 + bucket.longest).attach(landed)
            if ticket.states is not None:
                ticket.states.attach(landed, ticket.seats)
            if outcome.stamps is not None:
                times = _parts(times, outcome.stamps.tolist(), waits=bucket.masks)
            elif not ticket.chunks:
                times = times._replace(verify=times.step)
        if ticket.began is not None and ticket.all_read is not None:
            times = times._replace(read=ticket.began.elapsed_time(ticket.all_read) / 1e3)
        return landed_chunks, landed, times

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        by = drafter_of(self.drafters.get(drafter), self._grid.seats(batch), self.max_draft)
        passed = passed_length(by, draft, self.max_draft)
        length = self._grid.draft(passed, finds_fewer=by is None or looks_up(by))
        return self._seconds[length, (drafter if by else OFFERED) if length else None].near(batch)

    def _no_states(self, name: str, table: torch.Tensor) -> HeldStates:
        decoder = self._target.decoder
        width = len(taps_of(self.drafters[name])) * decoder.config.hidden_size
        capacity = held_for(name, self.drafters, self.max_draft)
        return HeldStates.empty(table, capacity=capacity, width=width, dtype=decoder.dtype)

    @rehearsal()
    def _read_dummies(self, most: int, contexts: Sequence[int] = ()) -> None:
        """Read chunks of the dummy lane, of at most `most` rows, with every drafter that reads along. `contexts`:
        bounds of positions beside those that the chunks need themselves."""
        lane, lanes, longest = self._state.dummy, self._grid.lanes, self._grid.longest - 1  # a head reads one ahead
        own = [name for name in (*self.readers, *self.tapping) if network_of(name, self.drafters) == name]
        for drafter in (None, *own):
            by, states = self.drafters.get(drafter or ""), self._held.get(drafter or "")
            models = [self._target, *([on_cuda(by.reader)] if by is not None and by.reader is not None else [])]
            counts = dummies.counts(self._grid.sizes(), [each.decoder.config.num_kv_heads for each in models])
            reads = [*dummies.prompts(lane, counts=counts, longest=longest, most=most, drafts=by is not None)]
            if by is not None and head_of(by) is not None:
                reads += dummies.held(lane, lanes=lanes)
            for chunks in reads:
                for context in dict.fromkeys([self._grid.context(chunks[0].count), *contexts]):
                    self._read(chunks, by, states, context, edits=False)

    def _change_dummies(self) -> None:
        """Write one page of the dummy lane, then two: torch loads the kernels of either on first use, in 17 ms."""
        for count in (1, 2):
            self._changes.set_pages(self._state.dummy, 0, [self._state.scratch_page] * count)
            self._changes.apply(self._upload)

    def _start_scores(self) -> int:
        """Return the `scores` of the start's buckets; 0: no memory for the tables of edits and the raw logits."""
        rows = 2 * len(self._state.lengths) + self._grid.lanes + self._grid.max_drafted
        vocab = self._target.vocab_size
        enough = self._free_bytes() > SPARE_BYTES + 4 * rows * vocab
        return 1 + min(TOPS[-1], vocab) if enough else 0

    def _make(self, bucket: Bucket) -> CudaRound:
        if bucket.edits or bucket.masks:
            self._state.make_tables(self._target.vocab_size)
        drafter = drafter_of(self.drafters.get(bucket.drafter or ""), bucket.seats, self.max_draft)
        return CudaRound(
            bucket,
            self._state,
            self._target,
            drafter,
            self._held.get(bucket.drafter or ""),
            self.synthetic_acceptance,
            max_draft=self.max_draft,
            judge=self.judge,
            recorder=None if bucket.eager else self._recorder,
            masks=self._masks.of(bucket.rows, tree=drafts_trees(drafter)) if bucket.masks else None,
        )

    def _has_room(self) -> bool:
        return self._recorder is not None and self._free_bytes() > SPARE_BYTES

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._state.device)[0]

    def _learn(self, ticket: Ticket, landed: Sequence[Landed], times: Times) -> None:
        bucket = ticket.bucket
        assert bucket is not None
        offered = bool(bucket.offers) and any(seat.offer is not None for seat in ticket.seats)
        runs_drafter = bucket.draft > 0 or bucket.copies > 0  # no call: every round would pay for it
        kind = (bucket.offers, OFFERED) if offered else (bucket.draft, bucket.drafter if runs_drafter else None)
        if not ticket.chunks and not (offered and runs_drafter) and times.step and ticket.typical:
            drafting = sum([seat.max_draft > 0 or seat.max_copy > 0 for seat in ticket.seats])
            self._seconds[kind].learn(len(ticket.seats), times.step, drafting=drafting)
        if bucket.longest:
            self._wanted.learn(bucket, ticket.seats, landed)


def _parts(times: Times, stamps: Sequence[int], *, waits: bool) -> Times:
    """Divide the time of a step by stamps. `waits`: the device waited for masks before it accepted."""
    draft, verify, accepting = (max(after - before, 0) / 1e9 for before, after in itertools.pairwise(stamps))
    if waits:
        verify = max(times.step - draft - accepting, 0.0)
    return times._replace(draft=draft, verify=verify, accept=accepting)
