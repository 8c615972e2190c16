"""Rounds for any torch device, in plain torch: the readable reference that tests compare other rounds with."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import round_reference as ops
from paceline.kernels import tree_reference as tree_ops
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Seat, Ticket, Times, drafts_trees, read_landed
from paceline.runner.vocabulary import fit_logits, fit_tokens
from paceline.sampling.sampler import Sampler


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
        self._drafters = dict(drafters or {})
        self.drafters: Collection[str] = self._drafters.keys()
        self.readers: Collection[str] = [name for name, by in self._drafters.items() if by.reader is not None]
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

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        self._changes.write(lane, tokens, sampler)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        clock = [time.perf_counter()]
        self._apply_changes()
        self._read_along([chunk for chunk in chunks if chunk.drafts], drafter)
        read = self._read(chunks)
        clock.append(time.perf_counter())
        drafted = self._draft(seats, drafter)
        clock.append(time.perf_counter())
        tree = any(drafted) and drafts_trees(self._drafters.get(drafter or ""))
        targets = self._verify(seats, drafted, tree=tree)
        clock.append(time.perf_counter())
        landed = self._accept(seats, drafted, targets, tree=tree)
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

    def _read(self, chunks: Sequence[Chunk]) -> list[Landed | None]:
        """Run the target over prompt chunks, and draw the first token after each prompt that ends here."""
        reading = [chunk for chunk in chunks if chunk.target]
        if not reading:
            return [None] * len(chunks)
        ends = itertools.accumulate(chunk.count for chunk in reading)
        outs = [end - 1 for chunk, end in zip(reading, ends, strict=True) if chunk.draws]
        logits = self._run(self._forward, self._chunk_rows(reading, outs)).logits
        lanes = self._ints([chunk.lane for chunk in reading if chunk.draws])
        targets = self._ints([0] * len(lanes))
        if len(lanes):
            ops.draw(logits, self._state, lanes=lanes, out=targets)
        landed = iter(self._settle(lanes, targets, roots=self._ints(range(len(lanes))), longest=0))
        return [next(landed) if chunk.draws else None for chunk in chunks]

    def _read_along(self, chunks: Sequence[Chunk], drafter: str | None) -> None:
        """Run the drafter's own model over the chunks that it reads."""
        reader = self._drafters[drafter].reader if drafter and chunks else None
        if reader is not None:
            self._run(reader, self._chunk_rows(chunks, []))

    def _draft(self, seats: Sequence[Seat], drafter: str | None) -> list[int]:
        """Write drafted tokens behind the committed ones of each seat; return their number for each seat."""
        limits = [seat.max_draft for seat in seats]
        if drafter is None or not any(limits):
            return [0] * len(seats)
        by, round = self._drafters[drafter], _PortableRound(self, seats)
        by.draft(round)
        return [int(count) for count in round.found] if by.finds_fewer else limits

    def _verify(self, seats: Sequence[Seat], drafted: Sequence[int], *, tree: bool) -> Tensor:
        """Draw the target's tokens [rows] after the last committed and every drafted token of each seat."""
        if not seats:
            return self._ints([])
        lanes = self._ints([seat.lane for seat in seats])
        batch, owners = self._seat_rows(lanes, [1 + count for count in drafted], first=-1, tree=tree)
        targets = torch.empty_like(owners)
        logits = self._run(self._forward, batch).logits
        ops.draw(logits, self._state, lanes=owners, positions=batch.positions, offset=1, out=targets)
        return targets

    def _accept(self, seats: Sequence[Seat], drafted: Sequence[int], targets: Tensor, *, tree: bool) -> list[Landed]:
        row_starts = self._ints([0, *itertools.accumulate(1 + count for count in drafted)])
        lanes = self._ints([seat.lane for seat in seats])
        longest = max(drafted, default=0)
        if not tree:
            return self._settle(lanes, targets, row_starts=row_starts, longest=longest)
        out = torch.zeros((len(seats), 4 + 4 * longest), dtype=torch.int32, device=self._state.device)
        coins = self.synthetic_acceptance
        tree_ops.tree_accept(
            self._state, seats=lanes, row_starts=row_starts, targets=targets, out=out, synthetic_acceptance=coins
        )
        source, target = tree_ops.tree_moves(self._state, seats=lanes, out=out)
        moved = source != target
        self._forward.kv.move(source[moved].tolist(), target[moved].tolist())
        return [read_landed(row, tree=True) for row in out.tolist()]

    def _settle(
        self,
        seats: Tensor,
        targets: Tensor,
        *,
        longest: int,
        row_starts: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> list[Landed]:
        """Accept, advance the lengths, and return the outcomes."""
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
        return [read_landed(row) for row in out.tolist()]

    def _seat_rows(self, seats: Tensor, counts: list[int], *, first: int, tree: bool = False) -> tuple[Batch, Tensor]:
        """Lay out rows from each seat's length + `first` on, all with logits; return them and the lane of each row."""
        tokens, positions, slots, owners, leads = (self._ints([0] * sum(counts)) for _ in range(5))
        row_starts, bases = self._ints([0] * (len(counts) + 1)), self._ints([0] * len(counts))
        tails = torch.zeros((len(tokens), max(counts) - 1), dtype=torch.int32, device=tokens.device) if tree else None
        lay_out = functools.partial(
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
        rows, table = self._ints(range(len(tokens))), self._page_table(seats, bases)
        return Batch(tokens, positions, slots, row_starts, bases, table, rows, tails), owners

    def _chunk_rows(self, chunks: Sequence[Chunk], outs: Sequence[int]) -> Batch:
        state, places = self._state, [range(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        seats = self._ints([chunk.lane for chunk in chunks])
        counts = self._ints([chunk.count for chunk in chunks])
        owners = seats.repeat_interleave(counts).long()
        positions = self._ints([*itertools.chain(*places)])
        bases = self._ints([place.stop for place in places])
        return Batch(
            tokens=state.tokens[owners, positions.long()],
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

    def __init__(self, rounds: PortableRounds, seats: Sequence[Seat]) -> None:
        self.state = rounds._state
        self._rounds = rounds
        self._limits = [seat.max_draft for seat in seats]
        self.longest = max(self._limits)
        self.lanes = rounds._ints([seat.lane for seat in seats])
        self.found = rounds._ints([0] * len(seats))

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

    def append(self, logits: Tensor, turn: int) -> None:
        wanting = self._wanting(turn)
        lanes = self.lanes[wanting]
        ops.draw(logits[wanting], self.state, lanes=lanes, offset=turn, out=torch.empty_like(lanes), push=True)

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
