"""Rounds for any torch device, in plain torch: the readable reference that tests compare other rounds with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import edit_reference, score_reference
from paceline.kernels import round_reference as ops
from paceline.kernels.base import Batch, Forward, Output
from paceline.kernels.edit_reference import RowMasks
from paceline.kernels.offer_reference import HEADER, offer
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.portable_accept import PortableAccept
from paceline.runner.rounds.portable_heads import PortableStates
from paceline.runner.rounds.portable_round import PortableRound
from paceline.runner.rounds.portable_rows import PortableRows
from paceline.runner.rounds.portable_step import PortableStep
from paceline.runner.rounds.protocol import (
    NOTHING,
    SPARE_OFFERED,
    Chunk,
    DeviceDrafter,
    Landed,
    Seat,
    Ticket,
    Times,
    tell_matches,
    write_offer,
)
from paceline.runner.rounds.round_states import RoundStates
from paceline.runner.rounds.rules import Judge, RoundRules, judged
from paceline.runner.rounds.scores import Report, Scorer
from paceline.runner.rounds.traits import (
    drafter_of,
    drafts_trees,
    longest_copy,
    longest_draft,
    network_of,
    reads_prediction,
    taps_of,
)
from paceline.runner.rounds.upload import Upload, download, first_masks
from paceline.runner.vocabulary import fit_tokens
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet
from paceline.types import Logprob


class PortableRounds:
    """Implements Rounds with a Forward and plain torch.

    `launch` returns when the step is complete, or lacks nothing but masks, so nothing overlaps. It lets the engine's
    device steps be tested on a CPU."""

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
        self._holders = [name for name in self.tapping if network_of(name, self.drafters) == name]
        self.max_draft = max_draft
        self.timed = False
        self.synthetic_acceptance = 0.0
        self.judge: Judge | None = None
        self._forward = forward
        self._state = DeviceState(
            lanes=lanes,
            width=max_context + max_draft + 2,
            scratch_page=forward.kv.num_pages,
            device=device,
            max_draft=max_draft,
            holding=len(self._holders),
            predicts=any(reads_prediction(by) for by in self.drafters.values()),
        )
        self._changes = Changes(self._state, vocab_size=forward.vocab_size)
        self._upload = Upload(self._state.device)
        self._rows = PortableRows(self._state)
        self._scorer = Scorer(self._state, score_reference)
        self._settle = PortableAccept(self._state, self._scorer, forward.kv)
        self._states = PortableStates(forward, self._state, self.drafters, max_draft=max_draft)

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        self._changes.write(lane, tokens, sampler, prediction)
        self._scorer.write(lane, sampler)

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
    ) -> Ticket:
        clock = [time.perf_counter()]
        self._changes.apply(self._upload)
        self._read_along([chunk for chunk in chunks if chunk.drafts], drafter)
        self._states.catch_up(drafter, [chunk.lane for chunk in chunks if not chunk.target])
        read = self._read(chunks, drafter)
        clock.append(time.perf_counter())
        rules = self._make_rules(seats)
        drafted, tree, matches = self._draft(seats, drafter, rules)
        clock.append(time.perf_counter())
        step = PortableStep(read, seats, masked, drafter, drafted, rules, tree=tree, matches=matches)
        self._verify(step)
        step.parts = [*(after - before for before, after in itertools.pairwise([*clock, time.perf_counter()]))]
        if not masked:
            self._end(step, ())
        return step

    def drafts(self, ticket: Ticket) -> Mapping[int, Sequence[Branch]]:
        step: PortableStep = ticket
        return {index: step.branches(index) for index in step.masked}

    def sheet(self, ticket: Ticket) -> MaskSheet:
        step: PortableStep = ticket
        rows = len(step.seats) + sum(step.drafted)
        step.sheet = MaskSheet.empty(rows, 2 * rows if step.tree else rows, self._forward.vocab_size)
        return step.sheet

    @torch.inference_mode()
    def draw(self, ticket: Ticket, drawing: Collection[int]) -> None:
        self._end(ticket, drawing)

    def wait(self, ticket: Ticket) -> None:
        pass  # the host itself has run the step

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        step: PortableStep = ticket
        assert len(step.parts) == 4, "a step waits for its masks"
        reading, draft, verify, accept = step.parts
        times = Times(step=sum(step.parts), draft=draft, verify=verify, accept=accept, read=reading)
        return step.read, step.landed, times

    def _end(self, step: PortableStep, drawing: Collection[int]) -> None:
        """Draw and accept; masked seats that do not draw are void."""
        began = time.perf_counter()
        void = [index for index in step.masked if index not in drawing]
        lanes = [self._state.dummy if i in void else seat.lane for i, seat in enumerate(step.seats)]
        masks = None if step.sheet is None else self._upload.masks(step.sheet)
        targets, verdicts = self._draw_rows(step, masks)
        step.landed = self._accept(step, self._rows.ints(lanes), targets, verdicts)
        for index in void:
            step.landed[index] = NOTHING
        tell_matches(step.landed, step.seats, step.matches)
        step.parts.append(time.perf_counter() - began)

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return None

    def improve(self) -> bool:
        return False

    def _read(self, chunks: Sequence[Chunk], drafter: str | None) -> list[Landed | None]:
        """Run the target over prompt chunks, draw the first token after each prompt that ends here, score prompts."""
        reading = [chunk for chunk in chunks if chunk.target]
        if not reading:
            return [None] * len(chunks)
        begins = [0, *itertools.accumulate(chunk.count for chunk in reading)]
        outs = [_outs(chunk, begin) for chunk, begin in zip(reading, begins, strict=False)]
        output = self._run(self._forward, self._rows.of_chunks(reading, [*itertools.chain(*outs)]))
        parts = torch.split(output.logits, [len(each) for each in outs])
        drawing = [i for i, chunk in enumerate(reading) if chunk.draws]
        masks = first_masks([reading[i].mask for i in drawing], self._upload, vocab_size=self._forward.vocab_size)
        drawn = self._draw_first([reading[i].lane for i in drawing], [parts[i][-1] for i in drawing], masks)
        self._show(reading, output, drafter)
        landed: list[Landed | None] = []
        for chunk, begin, logits in zip(reading, begins, parts, strict=False):
            own = drawn.pop(0) if chunk.draws else None
            if chunk.scored or chunk.states or chunk.tapped:
                states = None if output.states is None else output.states[begin : begin + chunk.count]
                features = output.features if chunk.tapped else None
                own = (own or NOTHING)._replace(
                    prompt_scores=self._score_prompt(chunk, logits),
                    states=download(states[-chunk.states :]) if chunk.states and states is not None else None,
                    features=None if features is None else download(features[begin : begin + chunk.count]),
                )
            landed.append(own)
        left = iter(landed)
        return [next(left) if chunk.target else None for chunk in chunks]

    def _show(self, chunks: Sequence[Chunk], output: Output, drafter: str | None) -> None:
        """Hold the hidden state of the last row of each prompt that ends here, and let a head read all rows. A row
        needs the next token, which is drawn by now."""
        ends = [*itertools.accumulate(chunk.count for chunk in chunks)]
        last = [(chunk.lane, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.draws]
        lanes, starts = (self._rows.ints(each) for each in (zip(*last, strict=True) if last else ([], [])))
        alone = self._rows.ints([0] * len(last))[:, None]  # nothing was drafted
        self._states.hold(drafter, output.features, seats=lanes, starts=starts, outcomes=alone)
        along = [chunk for chunk in chunks if chunk.drafts]
        if along and drafter in self.tapping:
            rows = [
                *itertools.chain(*(range(end - c.count, end) for c, end in zip(chunks, ends, strict=True) if c.drafts))
            ]
            self._states.show(drafter, output.features, self._rows.of_chunks(along, [], ahead=1), rows)

    def _draw_first(self, lanes: Sequence[int], logits: Sequence[Tensor], masks: RowMasks | None) -> list[Landed]:
        """Draw the first token of each lane from its logits [vocab]."""
        if not lanes:
            return []
        seats, rows, targets = self._rows.ints(lanes), torch.stack([*logits]), self._rows.ints([0] * len(lanes))
        self._draw(rows, lanes=seats, out=targets, masks=masks)
        out = torch.zeros((len(lanes), 4), dtype=torch.int32, device=seats.device)
        return self._settle(seats, rows, targets, out=out, roots=self._rows.ints(range(len(lanes))))

    def _score_prompt(self, chunk: Chunk, logits: Tensor) -> tuple[Logprob, ...]:
        tokens = self._state.tokens[chunk.lane, chunk.start + 1 : chunk.start + 1 + chunk.scored]
        report = Report(self._scorer.score_rows(logits[: chunk.scored], tokens, chunk.top).cpu())
        return report.read(0, tokens.tolist(), chunk.top)

    def _read_along(self, chunks: Sequence[Chunk], drafter: str | None) -> None:
        """Run the drafter's own model over the chunks that it reads."""
        reader = self.drafters[drafter].reader if drafter and chunks else None
        if reader is not None:
            self._run(reader, self._rows.of_chunks(chunks, []))

    def _make_rules(self, seats: Sequence[Seat]) -> RoundRules | None:
        """Prepare a round in which other rules than the coupled one judge drafts; None: there is no such rule."""
        own = judged(seats)
        if not own or self.judge is None:
            return None
        rules = RoundRules(
            tuple(sorted({seats[index].rule for index in own})),
            len(own),
            seats=len(seats),
            longest=max(seat.longest for seat in seats),
            vocab=self._forward.vocab_size,
            state=self._state,
        )
        rules.attend(self._rows.ints([seat.lane for seat in seats]))
        rules.ask(seats)
        rules.begin()
        return rules

    def _draft(
        self, seats: Sequence[Seat], drafter: str | None, rules: RoundRules | None
    ) -> tuple[list[int], bool, Sequence[int]]:
        """Write drafted tokens behind the committed ones. Return their number for each seat, whether they are trees,
        and what a lookup beside a network reports."""
        by = drafter_of(self.drafters.get(drafter or ""), len(seats), self.max_draft)
        most = longest_draft(by, self.max_draft) if by else 0
        limits, drafted = [0 if seat.offer else min(seat.max_draft, most) for seat in seats], [0] * len(seats)
        copies = [min(seat.max_copy, longest_copy(by)) for seat in seats]
        matches: Sequence[int] = ()
        if drafter and by and any((*limits, *copies)):
            round = PortableRound(self, seats, limits, copies, rules, drafter, by)
            by.draft(round)
            drafted, matches = round.found.tolist() if by.finds_fewer else limits, round.matches.tolist()
        return (taken := self._take_offers(seats, drafted)), any(taken) and any(limits) and drafts_trees(by), matches

    def _take_offers(self, seats: Sequence[Seat], drafted: list[int]) -> list[int]:
        """Write the offers that agree with the committed tokens behind them, over what was drafted for these seats."""
        if all(seat.offer is None for seat in seats):
            return drafted
        table = np.zeros((len(seats), HEADER + 2 * self.max_draft + 1 + SPARE_OFFERED), dtype=np.int32)
        for row, seat in zip(table, seats, strict=True):
            if seat.offer is not None:
                write_offer(row, seat.offer, most=seat.max_draft)
        counts, lanes = (self._rows.ints(x) for x in ([1 + count for count in drafted], [seat.lane for seat in seats]))
        offer(self._state, seats=lanes, offers=torch.from_numpy(table).to(self._state.device), counts=counts)
        return [count - 1 for count in counts.tolist()]

    def _verify(self, step: PortableStep) -> None:
        """Run the target over the last committed and every drafted token of each seat."""
        if not step.seats:
            return
        lanes = self._rows.ints([seat.lane for seat in step.seats])
        counts = [1 + count for count in step.drafted]
        trees = self._rows.of_trees(lanes, counts) if step.tree else None
        step.batch, step.owners = self._rows.of_seats(lanes, counts, first=-1) if trees is None else trees[:2]
        step.ancestors = None if trees is None else trees[2]
        step.output = self._run(self._forward, step.batch)

    def _draw_rows(self, step: PortableStep, masks: RowMasks | None) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [rows] drawn after each row, and the verdicts of other rules than the coupled one."""
        if step.output is None or step.batch is None or step.owners is None:
            return self._rows.ints([]), None
        batch, targets, logits = step.batch, torch.empty_like(step.owners), step.output.logits
        floors = torch.empty(logits.shape[0], device=logits.device)
        placed: dict[str, Any] = {"positions": batch.positions, "offset": 1, "ancestors": step.ancestors}
        edited = self._draw(logits, lanes=step.owners, out=targets, floors=floors, masks=masks, **placed)
        if step.rules is None or self.judge is None:
            return targets, None
        verdicts = step.rules.judge(
            self.judge,
            edited,
            floors,
            tokens=batch.tokens,
            positions=batch.positions,
            targets=targets,
            row_starts=batch.row_starts,
            tree=step.tree,
        )
        return targets, verdicts

    def _draw(
        self,
        logits: Tensor,
        *,
        lanes: Tensor,
        out: Tensor,
        offset: int = 0,
        ancestors: Tensor | None = None,
        masks: RowMasks | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw a token from a copy of logits with the edits of each row's lane, and return the edited logits; see
        `round_reference.draw`."""
        if self._state.marks.shape[1]:
            logits = logits.clone()
            edit = partial(edit_reference.edit, logits, self._state, lanes=lanes, offset=offset)
            edit(positions=options.get("positions"), ancestors=ancestors, masks=masks, ids=options.get("ids"))
        ops.draw(logits, self._state, lanes=lanes, out=out, offset=offset, **options)
        return logits

    def _accept(self, step: PortableStep, lanes: Tensor, targets: Tensor, verdicts: Tensor | None) -> list[Landed]:
        seats, output, tree = step.seats, step.output, step.tree
        if output is None:
            return []
        row_starts = self._row_starts(step.drafted)
        longest = max(step.drafted)
        out = torch.zeros((len(seats), 4 + (4 if tree else 2) * longest), dtype=torch.int32, device=lanes.device)
        landed = self._settle(
            lanes,
            output.logits,
            targets,
            out=out,
            row_starts=row_starts,
            verdicts=verdicts,
            tree=tree,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        read = self._rows.ints([0 if seat.offer else seat.max_draft for seat in seats])
        held = {"seats": lanes, "starts": row_starts, "outcomes": out, "read": read}
        self._states.hold(step.drafter, output.features, tree=tree, **held)
        if output.features is not None:
            RoundStates(output.features.cpu(), row_starts).attach(landed, seats)
        return landed

    def _row_starts(self, drafted: Sequence[int]) -> Tensor:
        return self._rows.ints([0, *itertools.accumulate(1 + count for count in drafted)])

    def _run(self, forward: Forward, batch: Batch) -> Output:
        vocab_size = self._forward.vocab_size
        return forward(fit_tokens(batch, vocab_size=vocab_size, model_vocab_size=forward.vocab_size))


def _outs(chunk: Chunk, begin: int) -> list[int]:
    """List the rows of a chunk from row `begin` on whose logits are wanted: the scored ones, and one to draw from."""
    return [*range(begin, begin + chunk.scored), *([begin + chunk.count - 1] if chunk.draws else [])]
