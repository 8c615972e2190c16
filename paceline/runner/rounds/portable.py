"""Rounds for any torch device, in plain torch: the readable reference that tests compare other rounds with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import round_reference as ops
from paceline.kernels import states_reference as states
from paceline.kernels import tree_reference as tree_ops
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.runner.heads.protocol import Head, HeadForward
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.portable_growth import PortableGrowth
from paceline.runner.rounds.protocol import (
    Chunk,
    DeviceDrafter,
    Landed,
    Seat,
    Ticket,
    Times,
    drafts_trees,
    head_of,
    longest_draft,
    read_landed,
    taps_of,
    threshold_of,
)
from paceline.runner.vocabulary import fit_logits, fit_tokens
from paceline.sampling.sampler import Sampler


class _Hold(Protocol):
    def __call__(self, *, tree: bool = False, **rows: Tensor) -> None: ...


class PortableRounds:
    """Implements Rounds with a Forward and plain torch.

    `launch` returns when the step is complete, so nothing overlaps. It lets the engine's device steps be tested on a
    CPU."""

    def __init__(
        self,
        forward: Forward,
        *,
        lanes: int,
        max_context: int,
        max_draft: int,
        drafters: Mapping[str, DeviceDrafter] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.drafters: Mapping[str, DeviceDrafter] = dict(drafters or {})
        self.readers: Collection[str] = [name for name, by in self.drafters.items() if by.reader is not None]
        self.tapping: Collection[str] = [name for name, by in self.drafters.items() if taps_of(by)]
        self.max_draft = max_draft
        self.synthetic_acceptance = 0.0
        self._forward = forward
        self._state = DeviceState(
            lanes=lanes,
            width=max_context + max_draft + 2,
            scratch_page=forward.kv.num_pages,
            device=device,
            max_draft=max_draft,
        )
        self._changes = Changes(self._state, vocab_size=forward.vocab_size)
        self._held = {name: self._no_states(self.drafters[name]) for name in self.tapping}  # by drafter

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        self._changes.write(lane, tokens, sampler)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        clock = [time.perf_counter()]
        self._apply_changes()
        self._read_along([chunk for chunk in chunks if chunk.drafts], drafter)
        read = self._read(chunks, drafter)
        clock.append(time.perf_counter())
        drafted = self._draft(seats, drafter)
        clock.append(time.perf_counter())
        tree = any(drafted) and drafts_trees(self.drafters.get(drafter or ""))
        targets, features = self._verify(seats, drafted, tree=tree)
        clock.append(time.perf_counter())
        landed = self._accept(seats, drafted, targets, partial(self._hold, drafter, features), tree=tree)
        clock.append(time.perf_counter())
        parts = [after - before for before, after in itertools.pairwise(clock)]
        return read, landed, Times(clock[-1] - clock[0], *parts[1:])

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        chunks, seats, times = ticket
        return chunks, seats, times

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return None

    def _apply_changes(self) -> None:
        if self._changes:
            places, values = (torch.from_numpy(each).to(self._state.device) for each in self._changes.take())
            self._state.memory[places] = values

    def _read(self, chunks: Sequence[Chunk], drafter: str | None) -> list[Landed | None]:
        """Run the target over prompt chunks, and draw the first token after each prompt that ends here."""
        reading = [chunk for chunk in chunks if chunk.target]
        if not reading:
            return [None] * len(chunks)
        ends = itertools.accumulate(chunk.count for chunk in reading)
        outs = [end - 1 for chunk, end in zip(reading, ends, strict=True) if chunk.draws]
        output = self._run(self._forward, self._chunk_rows(reading, outs))
        lanes = self._ints([chunk.lane for chunk in reading if chunk.draws])
        targets = self._ints([0] * len(lanes))
        if len(lanes):
            ops.draw(output.logits, self._state, lanes=lanes, out=targets)
        roots, hold = self._ints(range(len(lanes))), partial(self._hold, drafter, output.features)
        landed = iter(self._settle(lanes, targets, roots=roots, longest=0, hold=partial(hold, starts=self._ints(outs))))
        self._show(reading, output.features, drafter)
        return [next(landed) if chunk.draws else None for chunk in chunks]

    def _show(self, chunks: Sequence[Chunk], features: Tensor | None, drafter: str | None) -> None:
        """Let a head read the hidden states of chunks. A row needs the next token: that after a prompt is drawn by now,
        and its row is also held, because the draft begins with it."""
        head = head_of(self.drafters[drafter]) if drafter else None
        if head is None or features is None or not any(chunk.drafts for chunk in chunks):
            return
        along = [chunk.drafts for chunk in chunks for _ in range(chunk.count)]
        batch = self._chunk_rows([chunk for chunk in chunks if chunk.drafts], [], ahead=1)
        cast(HeadForward, head)(batch, features=self._columns(drafter or "", features)[torch.tensor(along)])

    def _hold(self, drafter: str | None, features: Tensor | None, *, tree: bool = False, **rows: Tensor) -> None:
        """Hold the hidden states of the rows that acceptance has committed, if the drafter of the launch reads them."""
        if drafter in self._held and drafter and features is not None:
            own = {"features": self._columns(drafter, features), **rows}
            states.hold(self._held[drafter], self._state, tree=tree, pdl=False, **own)

    def _no_states(self, drafter: DeviceDrafter) -> states.HeldStates:
        hidden = self._forward.embed(self._ints([0])).shape[1]
        return states.HeldStates.empty(
            lanes=self._state.dummy,
            capacity=1 + longest_draft(drafter, self.max_draft),
            width=len(taps_of(drafter)) * hidden,
            dtype=torch.float32,
            device=self._state.device,
        )

    def _columns(self, drafter: str, features: Tensor) -> Tensor:
        """Select the taps of one drafter from the features of all taps."""
        kept = features.chunk(len(self._forward.taps), dim=1)
        return torch.cat([kept[self._forward.taps.index(tap)] for tap in taps_of(self.drafters[drafter])], dim=1)

    def _read_along(self, chunks: Sequence[Chunk], drafter: str | None) -> None:
        """Run the drafter's own model over the chunks that it reads."""
        reader = self.drafters[drafter].reader if drafter and chunks else None
        if reader is not None:
            self._run(reader, self._chunk_rows(chunks, []))

    def _draft(self, seats: Sequence[Seat], drafter: str | None) -> list[int]:
        """Write drafted tokens behind the committed ones of each seat; return their number for each seat."""
        limits = [seat.max_draft for seat in seats]
        if drafter is None or not any(limits):
            return [0] * len(seats)
        by = self.drafters[drafter]
        round = _PortableRound(self, seats, by, self._held.get(drafter))
        by.draft(round)
        return [int(count) for count in round.found] if by.finds_fewer else limits

    def _verify(self, seats: Sequence[Seat], drafted: Sequence[int], *, tree: bool) -> tuple[Tensor, Tensor | None]:
        """Draw the target's tokens [rows] after the last committed and every drafted token of each seat; return them
        and the hidden states of the rows."""
        if not seats:
            return self._ints([]), None
        lanes = self._ints([seat.lane for seat in seats])
        batch, owners = self._seat_rows(lanes, [1 + count for count in drafted], first=-1, tree=tree)
        targets = torch.empty_like(owners)
        output = self._run(self._forward, batch)
        ops.draw(output.logits, self._state, lanes=owners, positions=batch.positions, offset=1, out=targets)
        return targets, output.features

    def _accept(
        self, seats: Sequence[Seat], drafted: Sequence[int], targets: Tensor, hold: _Hold, *, tree: bool
    ) -> list[Landed]:
        row_starts = self._ints([0, *itertools.accumulate(1 + count for count in drafted)])
        lanes = self._ints([seat.lane for seat in seats])
        hold = partial(hold, starts=row_starts, read=self._ints([seat.max_draft for seat in seats]))
        settle = self._settle_trees if tree else self._settle
        return settle(lanes, targets, row_starts=row_starts, longest=max(drafted, default=0), hold=hold)

    def _settle_trees(
        self, seats: Tensor, targets: Tensor, *, longest: int, hold: _Hold, row_starts: Tensor
    ) -> list[Landed]:
        """Accept paths of trees, move their keys and values into place, hold hidden states, and return the outcomes."""
        out = torch.zeros((len(seats), 4 + 4 * longest), dtype=torch.int32, device=self._state.device)
        tree_ops.tree_accept(
            self._state,
            seats=seats,
            row_starts=row_starts,
            targets=targets,
            out=out,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        source, target = tree_ops.tree_moves(self._state, seats=seats, out=out)
        moved = source != target
        self._forward.kv.move(source[moved].tolist(), target[moved].tolist())
        hold(seats=seats, outcomes=out, tree=True)
        return [read_landed(row, tree=True) for row in out.tolist()]

    def _settle(
        self,
        seats: Tensor,
        targets: Tensor,
        *,
        longest: int,
        hold: _Hold,
        row_starts: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> list[Landed]:
        """Accept, advance the lengths, hold hidden states, and return the outcomes."""
        if not len(seats):
            return []
        out = torch.zeros((len(seats), 2 + 2 * (longest + 1)), dtype=torch.int32, device=self._state.device)
        ops.accept(
            self._state,
            seats=seats,
            targets=targets,
            out=out,
            row_starts=row_starts,
            roots=roots,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        hold(seats=seats, outcomes=out)
        return [read_landed(row) for row in out.tolist()]

    def _seat_rows(self, seats: Tensor, counts: list[int], *, first: int, tree: bool = False) -> tuple[Batch, Tensor]:
        """Lay out rows from each seat's length + `first` on, all with logits; return them and the lane of each row."""
        tokens, positions, slots, owners, leads = (self._ints([0] * sum(counts)) for _ in range(5))
        row_starts, bases = self._ints([0] * (len(counts) + 1)), self._ints([0] * len(counts))
        tails = torch.zeros((len(tokens), max(counts) - 1), dtype=torch.int32, device=tokens.device) if tree else None
        lay_out = partial(
            ops.layout if tails is None else tree_ops.tree_layout,
            self._state,
            seats=seats,
            counts=self._ints(counts),
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=row_starts,
        )
        if tails is None:
            lay_out(first=first)
            bases = positions[row_starts[1:].long() - 1] + 1
        else:
            lay_out(bases=bases, tails=tails, leads=leads)
            tails = tails[leads.long()]
        rows, table = self._ints(range(len(tokens))), self._page_table(seats, bases)
        return Batch(tokens, positions, slots, row_starts, bases, table, rows, tails), owners

    def _chunk_rows(self, chunks: Sequence[Chunk], outs: Sequence[int], *, ahead: int = 0) -> Batch:
        state, places = self._state, [range(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        seats = self._ints([chunk.lane for chunk in chunks])
        counts = self._ints([chunk.count for chunk in chunks])
        owners = seats.repeat_interleave(counts).long()
        positions = self._ints([*itertools.chain(*places)])
        bases = self._ints([place.stop for place in places])
        return Batch(
            tokens=state.tokens[owners, positions.long() + ahead],
            positions=positions,
            slots=state.pages[owners, positions.long() // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            row_starts=self._ints([0, *itertools.accumulate(chunk.count for chunk in chunks)]),
            bases=bases,
            page_table=self._page_table(seats, bases),
            logit_rows=self._ints(outs),
        )

    def _page_table(self, seats: Tensor, bases: Tensor) -> Tensor:
        table: Tensor = self._state.pages[seats.long(), : -(-int(bases.max()) // PAGE_SIZE)]
        return table.contiguous()

    def _run(self, forward: Forward, batch: Batch) -> Output:
        vocab_size = self._forward.vocab_size
        return forward(fit_tokens(batch, vocab_size=vocab_size, model_vocab_size=forward.vocab_size))

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._state.device)


class _PortableRound:
    """Implements DraftingRound. Seats whose limit is reached take no part in passes: their rows are zeros."""

    def __init__(
        self, rounds: PortableRounds, seats: Sequence[Seat], drafter: DeviceDrafter, held: states.HeldStates | None
    ) -> None:
        self.state = rounds._state
        self._rounds = rounds
        self._limits = [seat.max_draft for seat in seats]
        self.longest = max(self._limits)
        self.lanes = rounds._ints([seat.lane for seat in seats])
        self.found = rounds._ints([0] * len(seats))
        self._held = held  # None: the drafter has no taps
        self._thresholds = torch.tensor([threshold_of(drafter, seat) for seat in seats])
        self._confidence = torch.full((len(seats),), -1.0 if taps_of(drafter) else 1.0)
        self._rows: list[int] = []  # row of each seat in the head's last pass; -1: none
        self._growth: PortableGrowth | None = None  # None: the draft is a chain

    def limits(self) -> Tensor:
        return self._rounds._ints(self._limits)

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        wanting, vocab_size = self._wanting(turn), self._rounds._forward.vocab_size
        batch, _ = self._rounds._seat_rows(self.lanes[wanting], [rows] * len(wanting), first=turn - rows)
        last = batch.row_starts[1:] - 1
        logits = fit_logits(self._rounds._run(model, replace(batch, logit_rows=last)).logits, vocab_size=vocab_size)
        whole = logits.new_zeros(len(self._limits), vocab_size)
        whole[wanting] = logits
        return whole

    def guess(self, head: Head, turn: int) -> Tensor:
        assert self._held is not None, "a drafter that runs a head has taps"
        if turn and self._growth is not None:
            return self._growth.guess(cast(HeadForward, head), turn, self._rounds._page_table)
        whole = torch.zeros(len(self._limits), len(head.ids))
        if turn == 0:
            logits = self._first_pass(cast(HeadForward, head), self._held)
        seats = [seat for seat in self._wanting(turn) if self._rows[seat] >= 0]
        if turn and seats:
            logits = self._next_pass(cast(HeadForward, head), seats, turn)
        if seats:
            whole[seats] = logits
        return whole

    def _first_pass(self, head: HeadForward, held: states.HeldStates) -> Tensor:
        """Read the held states of all seats; the last row of each that has any gives logits."""
        count = len(self._limits)
        rows = states.Taken.empty(
            seats=count,
            rows=count * held.capacity,
            turns=1,
            width=held.width,
            dtype=held.states.dtype,
            device=self.state.device,
        )
        states.take(held, self.state, seats=self.lanes, limits=self.limits(), into=rows)
        self._confidence = rows.confidence
        starts = rows.row_starts.tolist()
        self._rows = [stop - 1 if stop > start else -1 for start, stop in itertools.pairwise(starts)]
        there = [seat for seat, row in enumerate(self._rows) if row >= 0]
        if not there:
            return torch.zeros(0, len(head.ids))
        used = slice(0, starts[-1])
        ends = [self._rows[seat] for seat in there]
        batch = self._batch(there, rows.tokens[used], rows.positions[used], ends=[end + 1 for end in ends])
        return head(batch, features=rows.features[used]).logits

    def _next_pass(self, head: HeadForward, seats: list[int], turn: int) -> Tensor:
        """Continue from the last row of each of these seats, with the token that was drafted last."""
        lanes = self.lanes[seats].long()
        positions = self.state.lengths[lanes] - 2 + turn
        tokens = self.state.tokens[lanes, positions.long() + 1]
        batch = self._batch(seats, tokens, positions, ends=[*range(1, len(seats) + 1)])
        logits = head(batch, carry=[self._rows[seat] for seat in seats]).logits
        self._rows = [seats.index(seat) if seat in seats else -1 for seat in range(len(self._limits))]
        return logits

    def _batch(self, seats: list[int], tokens: Tensor, positions: Tensor, *, ends: list[int]) -> Batch:
        """Make a head's batch of rows, those of each seat up to `ends`, with logits of the last row of each."""
        starts = self._rounds._ints([0, *ends])
        owners = self.lanes[seats].repeat_interleave(starts.diff()).long()
        slots = self.state.pages[owners, positions.long() // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        bases = positions[starts[1:].long() - 1] + 1
        table = self._rounds._page_table(self.lanes[seats], bases)
        return Batch(tokens, positions, slots, starts, bases, table, starts[1:] - 1)

    def last_states(self) -> Tensor:
        assert self._held is not None, "a drafter that reads hidden states has taps"
        found, there = states.last(self._held, self.state, seats=self.lanes)
        self._confidence = torch.where(there, 1.0, -1.0)
        return found

    def append(self, logits: Tensor, turn: int, *, ids: Tensor | None = None, doubting: bool = False) -> None:
        wanting = self._wanting(turn)
        lanes = self.lanes[wanting]
        doubt = None
        if doubting:
            doubt = ops.Doubt(
                confidence=self._confidence[wanting],
                thresholds=self._thresholds[wanting],
                limits=self.limits()[wanting],
                found=self.found[wanting],
                turn=turn,
            )
        out = torch.empty_like(lanes)
        ops.draw(logits[wanting], self.state, lanes=lanes, offset=turn, out=out, push=True, ids=ids, doubt=doubt)
        if doubt is not None:
            self._confidence[wanting], self.found[wanting] = doubt.confidence, doubt.found

    def plant(self, *, width: int, levels: int) -> None:
        self._growth = PortableGrowth(self.state, self.lanes, limits=self.limits(), width=width, levels=levels)

    def branch(self, logits: Tensor, level: int, *, ids: Tensor | None = None, fitted: bool = True) -> None:
        assert self._growth is not None, "a tree must be planted first"
        ends = self._rounds._ints([0, *(row + 1 for row in self._rows or [0] * len(self._limits))])
        self._growth.branch(
            logits, level, ids=ids, fitted=fitted, roots=self._confidence, ends=ends, thresholds=self._thresholds
        )

    def prune(self) -> None:
        assert self._growth is not None, "a tree must be planted first"
        self._growth.prune(self.found)

    def look_up(self, *, min_ngram: int, max_ngram: int) -> None:
        ops.lookup(
            self.state,
            seats=self.lanes,
            limits=self.limits(),
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            found=self.found,
        )

    def _wanting(self, turn: int) -> list[int]:
        """Seats that may have more than `turn` drafted tokens."""
        return [seat for seat, limit in enumerate(self._limits) if limit > turn]
