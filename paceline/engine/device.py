"""Steps in the air: launched on a device while the one before them still runs, and landed when their outcome is wanted.

A step flies when every running sequence can: drafted by the device or by nobody, the coupled rule, and nothing asked
of sampling that needs the host between two tokens. One drafter flies at a time; where sequences want several they take
turns. What lands is what a step on the host gives: the draft of each work, and the verdict on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from paceline.draft import Draft
from paceline.drafters.guard import Guard
from paceline.engine.reading import Reading
from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.kv.pages import PagePool
from paceline.runner.rounds.protocol import Chunk, Landed, Rounds, Seat, Ticket, Times
from paceline.types import Off, OffKind, Rule, Verdict

DEPTH = 1  # steps in the air while the host plans another


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a flight: a chunk, or a seat if it decodes."""

    work: Work
    rows: int  # committed tokens that it reads; none for a seat, whose one is not counted as waiting
    draws: bool

    def take_off(self) -> None:
        self.work.sequence.air.take_off(rows=self.rows, draws=self.draws, max_draft=self.work.max_draft)

    def touch_down(self) -> None:
        self.work.sequence.air.touch_down(rows=self.rows, draws=self.draws, max_draft=self.work.max_draft)


@dataclass(frozen=True, slots=True)
class Flight:
    ticket: Ticket
    drafter: str | None
    parts: list[Part]  # chunks, then seats
    seats: int
    extra: int  # chunks that only the drafter reads; they come first and belong to no part


@dataclass(frozen=True, slots=True)
class Landing:
    """The outcome of a flight."""

    works: list[tuple[Work, Verdict | None]]  # of sequences that are still there; None: nothing was drawn
    ended: list[Sequence]  # that had left, and were in no other flight
    drafter: str | None
    times: Times
    waited: float  # seconds of the host
    wasted: int  # parts of sequences that had left
    decodes: bool  # nothing but decoding, and nothing wasted


class Flights:
    def __init__(
        self,
        rounds: Rounds,
        *,
        drafters: Mapping[str, Guard],
        pool: PagePool,
        max_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._rounds = rounds
        self._guards = drafters
        self._reading = Reading(rounds.readers, pool)
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._aloft: deque[Flight] = deque()
        self._turn = 0  # of the drafters, where several are wanted

    def __len__(self) -> int:
        return len(self._aloft)

    def carries(self, sequence: Sequence) -> bool:
        """True if a device can run all of this sequence's steps."""
        params, drafter = sequence.request.sampling, sequence.drafter
        if params.edits_logits or params.logprobs is not None or params.prompt_logprobs is not None:
            return False
        if drafter is None or (drafter in self._guards and self._guards[drafter].out is not None):
            return True
        rule = sequence.request.speculation.rule
        coupled = rule is Rule.COUPLED or (rule.lossless and sequence.sampler.greedy)
        return coupled and drafter in self._rounds.drafters

    def enter(self, sequence: Sequence) -> None:
        """The sequence got its lane."""
        self._reading.enter(sequence)

    def launch(self, works: Seq[Work]) -> None:
        for work in works:
            self._bring_aboard(work.sequence)
        reading = [work for work in works if not _decodes(work)]
        seats = [work for work in works if _decodes(work)]
        drafter = self._choose_drafter(seats, reading)
        extra = self._catch_up(seats) if drafter in self._rounds.readers else []
        chunks = [self._chunk(work, drafter) for work in reading]
        parts = [Part(work, rows=work.count, draws=work.samples) for work in reading]
        parts += [Part(work, rows=0, draws=True) for work in seats]
        for part in parts:
            part.take_off()
        ticket = self._rounds.launch(
            [*extra, *chunks],
            [Seat(work.sequence.lane, work.max_draft) for work in seats],
            drafter=drafter,
            context=max(work.sequence.longest for work in works),
        )
        self._aloft.append(Flight(ticket, drafter, parts, seats=len(seats), extra=len(extra)))

    def land(self) -> Landing:
        """Wait for the oldest step in the air."""
        flight = self._aloft.popleft()
        began = self._clock()
        chunks, seats, times = self._rounds.collect(flight.ticket)
        waited = self._clock() - began
        works, ended = [], []
        for part, landed in zip(flight.parts, [*chunks[flight.extra :], *seats], strict=True):
            part.touch_down()
            sequence = part.work.sequence
            if not sequence.air.left:
                works.append((part.work, self._verdict(part.work, landed, flight.drafter)))
            elif not sequence.air.flights:
                ended.append(sequence)
        wasted = len(flight.parts) - len(works)
        decodes = flight.seats == len(works) and not flight.extra
        return Landing(works, ended, flight.drafter, times, waited, wasted, decodes)

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """The engine is dead: nothing will land any more."""
        self._aloft.clear()
        for sequence in sequences:
            sequence.air.flights = 0

    def _bring_aboard(self, sequence: Sequence) -> None:
        """The device learns what it does not know of the sequence: all of it, or new pages."""
        air, span = sequence.air, sequence.span
        assert span is not None
        if not air.aboard:
            assert not air.flights, "a lane is rewritten under a step in the air"
            self._rounds.write(sequence.lane, np.array(sequence.tokens, dtype=np.int32), sequence.sampler)
            air.aboard, air.pages = True, 0
        if air.pages < len(span.pages):
            self._rounds.set_pages(sequence.lane, air.pages, span.pages[air.pages :])
            air.pages = len(span.pages)

    def _choose_drafter(self, seats: Seq[Work], reading: Seq[Work]) -> str | None:
        """Whose turn it is; the others go plain. Where nobody drafts, one that may read prompts."""
        wanted = list(dict.fromkeys(work.sequence.drafter for work in seats if work.max_draft))
        if not wanted:
            readers = [work.sequence.drafter for work in reading if work.sequence.drafter in self._rounds.readers]
            return readers[0] if readers else None
        self._turn += 1
        chosen = wanted[self._turn % len(wanted)]
        for work in seats:
            if work.max_draft and work.sequence.drafter != chosen:
                work.max_draft = 0
                work.sequence.off = Off(OffKind.OTHER_TURN, f"it is the turn of drafter {chosen}")
        return chosen

    def _catch_up(self, seats: Seq[Work]) -> list[Chunk]:
        """Chunks that bring the drafter in step with those that want a draft; who must wait longer goes plain."""
        chunks, room = [], self._max_step_tokens
        for work in seats:
            if not work.max_draft:
                continue
            sequence, missing = work.sequence, self._reading.missing(work.sequence)
            if missing and room:
                count = min(len(missing), room)
                chunks.append(Chunk(sequence.lane, missing.start, count, draws=False, target=False, drafts=True))
                self._reading.reach(sequence, missing.start + count)
                room -= count
                missing = missing[count:]
            if missing is None or missing:
                work.max_draft = 0
                sequence.off = Off(OffKind.BEHIND, "the drafter has not read all of the text yet")
        return chunks

    def _chunk(self, work: Work, drafter: str | None) -> Chunk:
        """The drafter reads along unless it has something to catch up with."""
        sequence, end = work.sequence, work.start + work.count
        along = sequence.drafter == drafter in self._rounds.readers and sequence.air.in_step >= work.start
        if along:
            self._reading.reach(sequence, end)
        return Chunk(sequence.lane, work.start, work.count, draws=work.samples, drafts=along)

    def _verdict(self, work: Work, landed: Landed | None, drafter: str | None) -> Verdict | None:
        if landed is None:
            return None
        if work.max_draft and drafter in self._rounds.readers:
            # The drafter has read all that it drafted but the last token, and what was accepted of it stays.
            read = min(landed.accepted, work.max_draft - 1)
            self._reading.reach(work.sequence, len(work.sequence.tokens) + read)
        work.draft = Draft(tokens=landed.drafted)
        return Verdict(path=tuple(range(landed.accepted)), token=landed.tokens[-1])


def _decodes(work: Work) -> bool:
    return work.samples and work.count == 1
