"""The device's stepper: a step stays in flight on a device while the engine plans the next one.

A step runs on the device if the device can run every sequence of it. Such a sequence has a drafter on the device or
none, and no sampling parameter that needs the host between two tokens. With a drafter it also has the coupled rule, or
any lossless rule at temperature 0, where all of them agree. Any other step runs on the host's stepper, once everything
in flight has landed. One drafter drafts in a step; if sequences want several, the drafters take turns. A landing has
drafts and verdicts, as one from the host has.

A drafter with keys and values of its own can only draft for what it has read:

    committed      0 .................. L-2  L-1 │
    read           0 ........ s-1                │      may draft if s >= L - 2: the first pass reads the last two

After a step that drafts this is true again. Plain steps, steps on the host, and prompts whose pages came from the
prefix cache leave a gap; the drafter then reads the missing positions as chunks that the target does not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from paceline.draft import Draft
from paceline.drafters.guard import Guard
from paceline.engine.governor import Governor
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.engine.stepper import Landing, Stepper
from paceline.kv.following import Follower, Reader
from paceline.kv.pages import PagePool
from paceline.runner.rounds.protocol import Chunk, Landed, Rounds, Seat, Ticket, Times, head_of, longest_draft
from paceline.types import Off, OffKind, Rule, Verdict

DEPTH = 1  # steps that may be in flight while the host plans another


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a step in flight: a chunk of its prompt, or a seat in the round if it decodes."""

    work: Work
    rows: int  # committed tokens that a chunk reads; 0 for a seat
    draws: bool

    def launch(self) -> None:
        self.work.sequence.in_flight.launch(rows=self.rows, draws=self.draws, max_draft=self.work.max_draft)

    def land(self) -> None:
        self.work.sequence.in_flight.land(rows=self.rows, draws=self.draws, max_draft=self.work.max_draft)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    ticket: Ticket
    drafter: str | None
    parts: list[Part]  # chunks, then seats
    seats: int
    extra: int  # chunks that only the drafter reads: first in the launch, and in no part


class DeviceStepper:
    """Implements Stepper."""

    def __init__(
        self,
        rounds: Rounds,
        *,
        host: Stepper,
        drafters: Mapping[str, Guard],
        pool: PagePool,
        governor: Governor,
        max_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`host` runs the steps that the device cannot."""
        self._rounds = rounds
        self._host = host
        self._guards = drafters
        # Drafters with keys and values of their own: those that read tokens, and heads, which read hidden states.
        self._readers = {name: Reader(pool) for name, by in rounds.drafters.items() if by.reader or head_of(by)}
        self._governor = governor
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._launched: deque[Launched] = deque()
        self._turn = 0  # counter that picks the drafter of a step if sequences want several

    @property
    def in_flight(self) -> int:
        return len(self._launched) + self._host.in_flight

    def depth(self, running: Seq[Sequence]) -> int:
        return DEPTH if all(map(self._can_run, running)) else 0

    def start(self, sequence: Sequence) -> None:
        self._host.start(sequence)
        span, reader = sequence.span, next((name for name in sequence.drafters if name in self._readers), None)
        assert span is not None
        if reader is not None:
            follower = self._readers[reader].start(lambda first, stop: span.pages[first:stop], span.reserved)
            sequence.in_flight.follower = follower

    def stop(self, sequence: Sequence) -> None:
        self._host.stop(sequence)

    def knows(self, sequence: Sequence, page: int) -> bool:
        heads = [name for name in sequence.drafters if name in self._readers and name in self._rounds.tapping]
        return self._host.knows(sequence, page) and all(page in self._readers[name] for name in heads)

    def launch(self, plan: StepPlan) -> None:
        if not plan.works:
            return
        if all(self._can_run(work.sequence) for work in plan.works):
            self._launch(plan.works)
        else:
            assert not self._launched, "a step on the host is launched while the device still runs one"
            self._host.launch(plan)
            for work in plan.works:
                work.sequence.in_flight.on_device = False  # the device has not seen this step

    def land(self) -> Landing:
        if not self._launched:
            return self._host.land()
        launched, began = self._launched.popleft(), self._clock()
        chunks, seats, times = self._rounds.collect(launched.ticket)
        waited = self._clock() - began
        works, ended = [], []
        for part, landed in zip(launched.parts, [*chunks[launched.extra :], *seats], strict=True):
            part.land()
            sequence = part.work.sequence
            if not sequence.in_flight.left:
                self._settle(part.work, landed, launched.drafter)
                works.append(part.work)
            elif not sequence.in_flight.steps:
                ended.append(sequence)
        decodes = len(launched.parts) == launched.seats == len(works) and not launched.extra and times.step > 0
        if decodes:
            self._observe_draft(works, launched.drafter, times)
        wasted = len(launched.parts) - len(works)
        return Landing(works, times, decodes=decodes, ended=ended, wasted=wasted, waited=waited)

    def observe(self, landing: Landing) -> None:
        if landing.inside:
            self._host.observe(landing)

    def abandon(self, sequences: Seq[Sequence]) -> None:
        self._host.abandon(sequences)
        self._launched.clear()
        for sequence in sequences:
            sequence.in_flight.steps = 0

    def _can_run(self, sequence: Sequence) -> bool:
        """True if the device can run all of this sequence's steps."""
        params, drafter = sequence.request.sampling, sequence.drafter
        if params.edits_logits or params.logprobs is not None or sequence.needs_prompt_rows:
            return False
        if drafter is None or (drafter in self._guards and self._guards[drafter].out is not None):
            return True
        rule = sequence.request.speculation.rule
        coupled = rule is Rule.COUPLED or (rule.lossless and sequence.sampler.greedy)
        return coupled and drafter in self._rounds.drafters

    def _launch(self, works: Seq[Work]) -> None:
        for work in works:
            self._write(work.sequence)
        reading = [work for work in works if not _decodes(work)]
        seats = [work for work in works if _decodes(work)]
        drafter = self._choose_drafter(seats, reading)
        extra = self._catch_up(seats) if drafter in self._rounds.readers else []
        chunks = [self._chunk(work, drafter) for work in reading]
        parts = [Part(work, rows=work.count, draws=work.samples) for work in reading]
        parts += [Part(work, rows=0, draws=True) for work in seats]
        for part in parts:
            part.launch()
        ticket = self._rounds.launch(
            [*extra, *chunks],
            [self._seat(work) for work in seats],
            drafter=drafter,
            context=max(work.sequence.longest for work in works),
        )
        self._launched.append(Launched(ticket, drafter, parts, seats=len(seats), extra=len(extra)))

    def _seat(self, work: Work) -> Seat:
        sequence, price = work.sequence, 0.0
        if work.max_draft:
            price = self._governor.seat_price(sequence.drafter or "")
        return Seat(sequence.lane, work.max_draft, price=price, p_min=sequence.request.speculation.p_min)

    def _write(self, sequence: Sequence) -> None:
        """Write to the device what it lacks: the whole sequence, or its new pages."""
        state, span = sequence.in_flight, sequence.span
        assert span is not None
        if not state.on_device:
            assert not state.steps, "a lane is rewritten under a step in flight"
            self._rounds.write(sequence.lane, np.array(sequence.tokens, dtype=np.int32), sequence.sampler)
            state.on_device, state.pages = True, 0
        if state.pages < len(span.pages):
            self._rounds.set_pages(sequence.lane, state.pages, span.pages[state.pages :])
            state.pages = len(span.pages)

    def _choose_drafter(self, seats: Seq[Work], reading: list[Work]) -> str | None:
        """Pick the drafter of this step, round-robin; sequences of other drafters decode plainly. If none drafts, pick
        one that has prompt tokens or hidden states to read."""
        wanted = list(dict.fromkeys(work.sequence.drafter for work in seats if work.max_draft))
        if not wanted:
            reading = [work for work in reading if work.sequence.drafter in self._readers]
            reading += [work for work in seats if work.sequence.drafter in self._rounds.tapping]
            return reading[0].sequence.drafter if reading else None
        self._turn += 1
        chosen = wanted[self._turn % len(wanted)]
        for work in seats:
            if work.max_draft and work.sequence.drafter != chosen:
                work.go_plain(Off(OffKind.OTHER_TURN, f"it is the turn of drafter {chosen}"))
        return chosen

    def _catch_up(self, seats: Seq[Work]) -> list[Chunk]:
        """Make chunks with which the drafter reads its missing positions of sequences that want a draft. A sequence
        whose missing positions do not fit into the step decodes plainly."""
        chunks, room = [], self._max_step_tokens
        for work in seats:
            if not work.max_draft:
                continue
            sequence, state = work.sequence, work.sequence.in_flight
            unread = state.unread(len(sequence.tokens))
            if unread and room and state.follower is not None:
                count = min(len(unread), room)
                chunks.append(Chunk(sequence.lane, unread.start, count, draws=False, target=False, drafts=True))
                state.follower.reach(unread.start + count)
                room -= count
                unread = unread[count:]
            if unread is None or unread:
                work.go_plain(Off(OffKind.BEHIND, "the drafter has not read all of the text yet"))
        return chunks

    def _chunk(self, work: Work, drafter: str | None) -> Chunk:
        """Make a chunk for the target. The drafter reads it too, unless it has not read all positions before it."""
        sequence, end = work.sequence, work.start + work.count
        follower = sequence.in_flight.follower if sequence.drafter == drafter in self._readers else None
        along = follower is not None and follower.known >= work.start
        if follower is not None and along:
            follower.reach(end)
        return Chunk(sequence.lane, work.start, work.count, draws=work.samples, drafts=along)

    def _settle(self, work: Work, landed: Landed | None, drafter: str | None) -> None:
        """Set draft and verdict of a work from its outcome; None: the work drew no token."""
        if landed is None:
            return
        follower = work.sequence.in_flight.follower
        if work.max_draft and drafter in self._rounds.readers and follower is not None:
            # The drafter has read its drafted tokens but the last one; the accepted ones among them stay valid.
            follower.reach(len(work.sequence.tokens) + min(landed.accepted, work.max_draft - 1))
        elif landed.drafted and drafter in self._readers and follower is not None:
            self._follow_head(follower, len(work.sequence.tokens) - 1, drafter or "")
        work.draft = Draft(tokens=landed.drafted, parents=landed.parents)
        work.verdict = Verdict(path=landed.path, token=landed.tokens[-1])
        work.in_place = True

    def _follow_head(self, follower: Follower, end: int, drafter: str) -> None:
        """Note that a head that drafts has read all held states, which end at `end`. States that were lost before leave
        a gap for good."""
        held = 1 + longest_draft(self._rounds.drafters[drafter], self._rounds.max_draft)
        if end - follower.known <= held:
            follower.reach(end)

    def _observe_draft(self, works: Seq[Work], drafter: str | None, times: Times) -> None:
        """Tell the cost model how long the drafts of a step took."""
        drafted = sum(len(work.draft) for work in works)
        if drafter is not None and drafted:
            self._governor.cost.observe_draft(drafter, tokens=drafted, depth=drafted, seconds=times.draft)


def _decodes(work: Work) -> bool:
    return work.samples and work.count == 1
