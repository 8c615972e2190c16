"""Rounds for any torch device, in plain torch: the readable reference that tests compare other rounds with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import edit_reference, score_reference
from paceline.kernels import round_reference as ops
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.kernels.offer_reference import HEADER, offer
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.protocol import (
    NOTHING,
    Chunk,
    DeviceDrafter,
    Landed,
    Seat,
    Ticket,
    Times,
    read_landed,
    write_offer,
)
from paceline.runner.rounds.rules import Judge, RoundRules, judged
from paceline.runner.rounds.scores import Report, Scorer, Verified
from paceline.runner.rounds.upload import Upload, download
from paceline.runner.vocabulary import fit_logits, fit_tokens
from paceline.sampling.sampler import Sampler
from paceline.types import Logprob


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
        self.judge: Judge | None = None
        self._forward = forward
        self._state = DeviceState(
            lanes=lanes, width=max_context + max_draft + 2, scratch_page=forward.kv.num_pages, device=device
        )
        self._changes = Changes(self._state, vocab_size=forward.vocab_size)
        self._upload = Upload(self._state.device)
        self._scorer = Scorer(self._state, self._upload, score_reference)

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        self._changes.write(lane, tokens, sampler)
        self._scorer.write(lane, sampler)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._changes.set_pages(lane, first, pages)

    def set_mask(self, lane: int, bits: np.ndarray, *, sure: int = 0) -> None:
        self._changes.set_mask(lane, bits, sure=sure)

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        clock = [time.perf_counter()]
        self._changes.apply(self._upload)
        self._read_along([chunk for chunk in chunks if chunk.drafts], drafter)
        read = self._read(chunks)
        clock.append(time.perf_counter())
        rules = self._make_rules(seats)
        drafted = self._draft(seats, drafter, rules)
        clock.append(time.perf_counter())
        logits, targets, verdicts = self._verify(seats, drafted, rules)
        clock.append(time.perf_counter())
        landed = self._accept(seats, drafted, logits, targets, verdicts)
        clock.append(time.perf_counter())
        reading, draft, verify, accept = (after - before for before, after in itertools.pairwise(clock))
        times = Times(step=clock[-1] - clock[0], draft=draft, verify=verify, accept=accept, read=reading)
        return read, landed, times

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        chunks, seats, times = ticket
        return chunks, seats, times

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return None

    def improve(self) -> bool:
        return False

    def _read(self, chunks: Sequence[Chunk]) -> list[Landed | None]:
        """Run the target over prompt chunks, draw the first token after each prompt that ends here, score prompts."""
        reading = [chunk for chunk in chunks if chunk.target]
        if not reading:
            return [None] * len(chunks)
        begins = [0, *itertools.accumulate(chunk.count for chunk in reading)]
        outs = [_outs(chunk, begin) for chunk, begin in zip(reading, begins, strict=False)]
        output = self._run(self._forward, self._chunk_rows(reading, [*itertools.chain(*outs)]))
        parts = torch.split(output.logits, [len(each) for each in outs])
        drawing = [i for i, chunk in enumerate(reading) if chunk.draws]
        drawn = self._draw_first([reading[i].lane for i in drawing], [parts[i][-1] for i in drawing])
        landed: list[Landed | None] = []
        for chunk, begin, logits in zip(reading, begins, parts, strict=False):
            own = drawn.pop(0) if chunk.draws else None
            if chunk.scored or chunk.states:
                states = None if output.states is None else output.states[begin : begin + chunk.count]
                own = replace(
                    own or NOTHING,
                    prompt_scores=self._score_prompt(chunk, logits),
                    states=download(states[-chunk.states :]) if chunk.states and states is not None else None,
                )
            landed.append(own)
        left = iter(landed)
        return [next(left) if chunk.target else None for chunk in chunks]

    def _draw_first(self, lanes: Sequence[int], logits: Sequence[Tensor]) -> list[Landed]:
        """Draw the first token of each lane from its logits [vocab]."""
        if not lanes:
            return []
        seats, rows, targets = self._ints(lanes), torch.stack([*logits]), self._ints([0] * len(lanes))
        self._draw(rows, lanes=seats, out=targets)
        return self._settle(seats, rows, targets, roots=self._ints(range(len(lanes))), longest=0)

    def _score_prompt(self, chunk: Chunk, logits: Tensor) -> tuple[Logprob, ...]:
        tokens = self._state.tokens[chunk.lane, chunk.start + 1 : chunk.start + 1 + chunk.scored]
        report = Report(self._scorer.score_rows(logits[: chunk.scored], tokens, chunk.top).cpu())
        return report.read(0, tokens.tolist(), chunk.top)

    def _read_along(self, chunks: Sequence[Chunk], drafter: str | None) -> None:
        """Run the drafter's own model over the chunks that it reads."""
        reader = self._drafters[drafter].reader if drafter and chunks else None
        if reader is not None:
            self._run(reader, self._chunk_rows(chunks, []))

    def _make_rules(self, seats: Sequence[Seat]) -> RoundRules | None:
        """Prepare a round in which other rules than the coupled one judge drafts; None: there is no such rule."""
        own = judged(seats)
        if not own or self.judge is None:
            return None
        rules = RoundRules(
            tuple(sorted({seats[index].rule for index in own})),
            len(own),
            seats=len(seats),
            longest=max(seat.max_draft for seat in seats),
            vocab=self._forward.vocab_size,
            state=self._state,
        )
        rules.attend(self._ints([seat.lane for seat in seats]))
        rules.ask(seats)
        rules.begin()
        return rules

    def _draft(self, seats: Sequence[Seat], drafter: str | None, rules: RoundRules | None) -> list[int]:
        """Write drafted tokens behind the committed ones of each seat; return their number for each seat."""
        limits, drafted = [0 if seat.offer else seat.max_draft for seat in seats], [0] * len(seats)
        if drafter is not None and any(limits):
            by, round = self._drafters[drafter], _PortableRound(self, seats, limits, rules)
            by.draft(round)
            drafted = round.found.tolist() if by.finds_fewer else limits
        return self._take_offers(seats, drafted)

    def _take_offers(self, seats: Sequence[Seat], drafted: list[int]) -> list[int]:
        """Write the offers that agree with the committed tokens behind them, over what was drafted for these seats."""
        if all(seat.offer is None for seat in seats):
            return drafted
        table = np.zeros((len(seats), HEADER + 2 * self.max_draft + 1), dtype=np.int32)
        for row, seat in zip(table, seats, strict=True):
            if seat.offer is not None:
                write_offer(row, seat.offer, most=seat.max_draft)
        counts, lanes = self._ints([1 + count for count in drafted]), self._ints([seat.lane for seat in seats])
        offer(self._state, seats=lanes, offers=torch.from_numpy(table).to(self._state.device), counts=counts)
        return [count - 1 for count in counts.tolist()]

    def _verify(
        self, seats: Sequence[Seat], drafted: Sequence[int], rules: RoundRules | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return raw logits [rows, vocab] after the last committed and every drafted token of each seat, the target's
        tokens [rows] drawn there, and the verdicts of other rules than the coupled one."""
        if not seats:
            return torch.empty((0, self._forward.vocab_size)), self._ints([]), None
        lanes = self._ints([seat.lane for seat in seats])
        batch, owners = self._seat_rows(lanes, [1 + count for count in drafted], first=-1)
        targets = torch.empty_like(owners)
        logits = self._run(self._forward, batch).logits
        floors = torch.empty(logits.shape[0], device=logits.device)
        edited = self._draw(logits, lanes=owners, positions=batch.positions, offset=1, out=targets, floors=floors)
        if rules is None or self.judge is None:
            return logits, targets, None
        verdicts = rules.judge(
            self.judge, edited, floors, tokens=batch.tokens, targets=targets, row_starts=batch.row_starts
        )
        return logits, targets, verdicts

    def _draw(self, logits: Tensor, *, lanes: Tensor, out: Tensor, offset: int = 0, **options: Any) -> Tensor:
        """Draw a token from a copy of logits with the edits of each row's lane, and return the edited logits; see
        `round_reference.draw`."""
        if self._state.marks.shape[1]:
            logits = logits.clone()
            edit_reference.edit(logits, self._state, lanes=lanes, positions=options.get("positions"), offset=offset)
        ops.draw(logits, self._state, lanes=lanes, out=out, offset=offset, **options)
        return logits

    def _accept(
        self,
        seats: Sequence[Seat],
        drafted: Sequence[int],
        logits: Tensor,
        targets: Tensor,
        verdicts: Tensor | None,
    ) -> list[Landed]:
        row_starts = self._ints([0, *itertools.accumulate(1 + count for count in drafted)])
        lanes = self._ints([seat.lane for seat in seats])
        longest = max(drafted, default=0)
        return self._settle(lanes, logits, targets, row_starts=row_starts, verdicts=verdicts, longest=longest)

    def _settle(
        self,
        seats: Tensor,
        logits: Tensor,
        targets: Tensor,
        *,
        longest: int,
        row_starts: Tensor | None = None,
        roots: Tensor | None = None,
        verdicts: Tensor | None = None,
    ) -> list[Landed]:
        """Accept, advance the lengths, and return the outcomes, with scores by the raw logits [rows, vocab]."""
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
            verdicts=verdicts,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        if self._state.marks.shape[1]:
            edit_reference.count(self._state, seats=seats, outcomes=out)
        landed = [read_landed(row) for row in out.tolist()]
        starts = roots if row_starts is None else row_starts
        assert starts is not None
        scores = self._scorer.score_seats(seats.tolist(), Verified(logits, out, starts, seats))
        if scores is not None:
            scores.attach(landed)
        return landed

    def _seat_rows(self, seats: Tensor, counts: list[int], *, first: int) -> tuple[Batch, Tensor]:
        """Lay out rows from each seat's length + `first` on, all with logits; return them and the lane of each row."""
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
            states=any(chunk.states for chunk in chunks),
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
        self, rounds: PortableRounds, seats: Sequence[Seat], limits: list[int], rules: RoundRules | None
    ) -> None:
        self._rules = rules
        self.state = rounds._state
        self._rounds = rounds
        self._limits = limits
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
        lanes, rules = self.lanes[wanting], self._rules
        drawn, floors = torch.empty_like(lanes), torch.zeros(len(self._limits), device=logits.device)
        found, free = floors[wanting], None if rules is None else rules.free[wanting]
        options: dict[str, Any] = {"offset": turn, "push": True, "free": free, "floors": found}
        edited = self._rounds._draw(logits[wanting], lanes=lanes, out=drawn, **options)
        if rules is not None:
            whole = torch.zeros_like(logits)
            whole[wanting], floors[wanting] = edited, found
            rules.keep(whole, floors, turn)

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


def _outs(chunk: Chunk, begin: int) -> list[int]:
    """List the rows of a chunk from row `begin` on whose logits are wanted: the scored ones, and one to draw from."""
    return [*range(begin, begin + chunk.scored), *([begin + chunk.count - 1] if chunk.draws else [])]
