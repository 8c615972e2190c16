"""Rounds for any torch device, in plain torch: shows what a device must do, and is the oracle of tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import round_reference as ops
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import Chunk, Landed, Lookup, Seat, Ticket, Times, read_landed
from paceline.sampling.sampler import Sampler


class PortableRounds:
    """Implements Rounds with a Forward and plain torch. Everything is done by the time `launch` returns: it shows what
    a device must do, and lets the engine's way of flying be tested on a CPU, but saves no time."""

    def __init__(
        self,
        forward: Forward,
        *,
        lanes: int,
        max_context: int,
        max_draft: int,
        drafters: Mapping[str, Forward | Lookup] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._drafters = dict(drafters or {})
        self.drafters: Collection[str] = self._drafters.keys()
        self.readers: Collection[str] = [
            name for name, by in self._drafters.items() if not isinstance(by, Lookup) and by.kv is not forward.kv
        ]
        self.max_draft = max_draft
        self.synthetic_acceptance = 0.0
        self._forward = forward
        self._state = DeviceState(
            lanes=lanes, width=max_context + max_draft + 2, scratch_page=forward.kv.num_pages, device=device
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
        targets = self._verify(seats, drafted)
        clock.append(time.perf_counter())
        landed = self._accept(seats, drafted, targets)
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
        """The target's pass over prompts, and the first token of each that ends here."""
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
        by = self._drafters[drafter or ""] if chunks else Lookup()
        if not isinstance(by, Lookup):
            self._run(by, self._chunk_rows(chunks, []))

    def _draft(self, seats: Sequence[Seat], drafter: str | None) -> list[int]:
        """Guesses behind the committed tokens of each seat; how many, one a seat."""
        limits = [seat.max_draft for seat in seats]
        if drafter is None or not any(limits):
            return [0] * len(seats)
        by = self._drafters[drafter]
        if isinstance(by, Lookup):
            return self._look_up(seats, by)
        for turn in range(max(limits)):
            self._guess(by, [seat.lane for seat in seats if seat.max_draft > turn], turn)
        return limits

    def _guess(self, model: Forward, lanes: Sequence[int], turn: int) -> None:
        """One more token for each lane. A drafter with its own KV memory reads the last two committed tokens first:
        after a draft that was accepted to its end it has not read the last one. One that shares the target's leaves
        its own keys and values there, and verification writes over all of them."""
        seats, count = self._ints(lanes), 2 if turn == 0 and model.kv is not self._forward.kv else 1
        batch, _ = self._seat_rows(seats, [count] * len(lanes), first=turn - count)
        last = batch.row_starts[1:] - 1
        logits = self._in_target_vocabulary(self._run(model, replace(batch, logit_rows=last)).logits)
        ops.draw(logits, self._state, lanes=seats, offset=turn, out=torch.empty_like(seats), push=True)

    def _look_up(self, seats: Sequence[Seat], by: Lookup) -> list[int]:
        found = self._ints([0] * len(seats))
        ops.lookup(
            self._state,
            seats=self._ints([seat.lane for seat in seats]),
            limits=self._ints([seat.max_draft for seat in seats]),
            min_ngram=by.min_ngram,
            max_ngram=by.max_ngram,
            found=found,
        )
        return [int(count) for count in found]

    def _verify(self, seats: Sequence[Seat], drafted: Sequence[int]) -> Tensor:
        """What the target draws [rows] after the last committed and every drafted token of each seat."""
        if not seats:
            return self._ints([])
        lanes = self._ints([seat.lane for seat in seats])
        batch, owners = self._seat_rows(lanes, [1 + count for count in drafted], first=-1)
        targets = torch.empty_like(owners)
        logits = self._run(self._forward, batch).logits
        ops.draw(logits, self._state, lanes=owners, positions=batch.positions, offset=1, out=targets)
        return targets

    def _accept(self, seats: Sequence[Seat], drafted: Sequence[int], targets: Tensor) -> list[Landed]:
        row_starts = self._ints([0, *itertools.accumulate(1 + count for count in drafted)])
        lanes = self._ints([seat.lane for seat in seats])
        return self._settle(lanes, targets, row_starts=row_starts, longest=max(drafted, default=0))

    def _settle(
        self,
        seats: Tensor,
        targets: Tensor,
        *,
        longest: int,
        row_starts: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> list[Landed]:
        """Accept, move lengths on, and say what happened."""
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

    def _seat_rows(self, seats: Tensor, counts: list[int], *, first: int) -> tuple[Batch, Tensor]:
        """Rows from each seat's length + `first` on, all with logits, and the lane of each row."""
        tokens, positions, slots, owners = (self._ints([0] * sum(counts)) for _ in range(4))
        row_starts = self._ints([0] * (len(counts) + 1))
        ops.layout(
            self._state,
            seats=seats,
            counts=self._ints(counts),
            first=first,
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=row_starts,
        )
        bases = positions[row_starts[1:].long() - 1] + 1
        rows = self._ints(range(len(tokens)))
        return Batch(tokens, positions, slots, row_starts, bases, self._page_table(seats, bases), rows), owners

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
        """A drafter may meet a token of the target that it has no row for: any other will do."""
        return forward(replace(batch, tokens=batch.tokens.clamp(max=forward.vocab_size - 1)))

    def _in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Vocabularies of one family differ in their padding: cut, or fill with impossible tokens."""
        missing = self._forward.vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)  # a negative width cuts

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._state.device)
