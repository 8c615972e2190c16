"""The device's stepper: a step stays in flight on a device while the engine plans the next one.

Every step runs on the device. One drafter of the device drafts in a step; if sequences want several, these drafters
take turns. Drafters on the host draft beside the step in flight (`engine.offers`), any number of them. If one reads
hidden states, they come with the landing. A landing has drafts and verdicts, as one from the host has.

A drafter with keys and values of its own can only draft for what it has read:

    committed      0 .................. L-2  L-1 │
    read           0 ........ s-1                │      may draft if s >= L - 2: the first pass reads the last two

After a step that drafts this is true again. Plain steps, and prompts whose pages came from the prefix cache, leave a
gap; the drafter then reads the missing positions as chunks that the target does not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.accept.registry import in_use
from paceline.draft import Draft
from paceline.engine.governor import Governor
from paceline.engine.hearing import Hearing
from paceline.engine.host_drafters import HostDrafters
from paceline.engine.masks import Masks
from paceline.engine.offers import Offers
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.engine.stepper import Landing
from paceline.kv.following import Reader
from paceline.kv.pages import PagePool
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import Chunk, Landed, Offer, Rounds, Seat, Ticket, Times
from paceline.runner.rounds.traits import drafter_of, drafts_trees, network_of
from paceline.types import Off, OffKind, Rule, Verdict

DEPTH = 1  # steps that may be in flight while the host plans another


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight. Its works are chunks of prompts, or seats in the round if their sequence decodes."""

    plan: StepPlan
    ticket: Ticket
    drafter: str | None
    reading: list[Work]  # chunks
    seats: list[Work]
    extra: int  # chunks that only the drafter reads: first in the launch, and of no work
    masked: bool  # seats draw with masks
    planned: float | None  # seconds in which the host planned and launched it; None: not known


class DeviceStepper:
    """Implements Stepper."""

    def __init__(
        self,
        rounds: Rounds,
        *,
        drafters: HostDrafters,
        lanes: Lanes,
        pool: PagePool,
        governor: Governor,
        max_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._rounds = rounds
        self._drafters = drafters
        self._lanes = lanes
        self._offers = Offers(drafters, governor, clock)
        self._hearing = Hearing(rounds)
        # Drafters with keys and values of their own: those that read tokens, and heads, which read hidden states.
        own = [name for name in rounds.drafters if name in rounds.readers or name in self._hearing.heads]
        readers = {network_of(name, rounds.drafters): Reader(pool) for name in own}
        self._readers = {name: readers[network_of(name, rounds.drafters)] for name in own}
        assert governor.in_rounds is not None, "this governor knows of no rounds"
        self._governor, self._in_rounds = governor, governor.in_rounds
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._launched: deque[Launched] = deque()
        self._masks = Masks(rounds)
        self._undrawn: Launched | None = None  # the latest step, if it lacks masks
        self._kept_seats: dict[int, Seat] = {}  # sequence → its latest seat
        self._kept_for: tuple[float, bool] = 0.0, False  # price and kind of drafts that these seats are for
        self._turn = 0  # counter that picks the drafter of a step if sequences want several
        self._step_seconds = 0.0  # time that the device took for the last step
        self._landed: Launched | None = None  # the step that landed last
        self._landed_at = 0.0
        self._observed_at: float | None = None  # time from which the host plans the next step; None: it was idle

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    @property
    def depth(self) -> int:
        return DEPTH

    def start(self, sequence: Sequence) -> None:
        self._drafters.start(sequence)
        self._masks.start(sequence)
        span, reader = sequence.span, next((name for name in sequence.drafters if name in self._readers), None)
        assert span is not None
        if reader is not None:
            follower = self._readers[reader].start(lambda first, stop: span.pages[first:stop], span.reserved)
            sequence.in_flight.follower, sequence.in_flight.heard = follower, follower.known

    def stop(self, sequence: Sequence) -> None:
        self._drafters.stop(sequence)
        self._masks.stop(sequence)
        self._offers.forget(sequence)
        self._kept_seats.pop(sequence.key, None)

    def knows(self, sequence: Sequence, page: int) -> bool:
        heads = [name for name in sequence.drafters if name in self._hearing.heads]
        return self._drafters.knows(sequence, page) and all(page in self._readers[name] for name in heads)

    def ready(self, sequence: Sequence) -> bool:
        """True unless a slow grammar must see a token in flight first, or a worker computes its mask."""
        return self._masks.ready(sequence)

    def launch(self, plan: StepPlan) -> None:
        if plan.works:
            self._launch(plan)
            self._draw()
        elif not self._launched:
            self._masks.wait()

    def land(self) -> Landing:
        launched, began = self._launched.popleft(), self._clock()
        self._rounds.wait(launched.ticket)
        self._landed, self._landed_at = launched, self._clock()
        waited = self._landed_at - began
        chunks, seats, times = self._rounds.collect(launched.ticket)
        self._step_seconds = times.step
        if launched.drafter is not None and any(work.by_network and not work.forced for work in launched.seats):
            self._in_rounds.charge(launched.drafter, batch=len(launched.seats), seconds=times.step)
        works, ended = [], []
        all_works, outcomes = [*launched.reading, *launched.seats], [*chunks[launched.extra :], *seats]
        rows = [*[work.count for work in launched.reading], *[0] * len(launched.seats)]
        for work, landed, read in zip(all_works, outcomes, rows, strict=True):
            state = work.sequence.in_flight
            if work.void:
                state.steps -= 1
            else:
                state.land(read, work.samples, work.max_draft)
            if work.unmasked and landed is not None and not state.left and not work.void:
                landed = self._check(work, landed, launched.drafter)
            if not state.left and not work.void:
                if landed is not None:  # else only keys and values were wanted
                    self._settle(work, landed)
                works.append(work)
            elif state.left and not state.steps:
                ended.append(work.sequence)
        wasted = len(all_works) - len(works)
        decodes = not launched.reading and not wasted and not launched.extra and times.step > 0
        if decodes:
            self._observe_draft(works, launched.drafter, times)
        return Landing(
            works,
            times,
            decodes=decodes,
            ended=ended,
            wasted=wasted,
            waited=waited,
            crowded=launched.plan.crowded,
            side=launched.plan.side,
        )

    def observe(self, landing: Landing) -> None:
        self._masks.ask(landing.works)
        self._draw()
        self._drafters.observe(landing.works)
        self._drafters.hand_over(landing.works, crowded=landing.crowded)
        self._observe_host(landing)

    def _observe_host(self, landing: Landing) -> None:
        """Tell the governor how long the host was busy with a step: planning and launching it, and with its outcome.

        Only while another step is in flight: otherwise the host may have nothing to do. And only of typical steps: the
        recording of a graph takes the host as long as many steps."""
        now, step = self._clock(), self._landed
        self._observed_at = now if self._launched else None
        if step is None or step.planned is None or not landing.decodes or not landing.times.typical:
            return
        drafters = {work.drafter for work in landing.works if work.max_draft and not work.forced}
        self._in_rounds.host.learn(
            step.planned + now - self._landed_at,
            drafter=step.drafter if step.drafter in drafters else next(iter(drafters), None),
            batch=len(step.seats),
            masked=step.masked,
        )

    def improve(self) -> bool:
        return not self._launched and self._rounds.improve()

    def abandon(self, sequences: Seq[Sequence]) -> None:
        self._launched.clear()
        self._undrawn = None
        for sequence in sequences:
            sequence.in_flight.steps = 0

    def _launch(self, plan: StepPlan) -> None:
        works = plan.works
        for work in works:
            state, span = work.sequence.in_flight, work.sequence.span
            if not state.on_device or span is None or state.pages < len(span.pages):
                self._write(work.sequence)
        # Works that decode are seats, but hidden states of a pooled prompt come from chunks alone.
        seats = [work for work in works if work.samples and work.count == 1 and work.sequence.pool is None]
        reading = []
        if len(seats) < len(works):
            reading = [work for work in works if not work.decodes or work.sequence.pool is not None]
        forced, masked = self._masks.offers(works), self._masks.choose(seats)
        wanting = [work for work in seats if work.max_draft and not work.forced]
        drafter = self._choose_drafter(wanting, seats, reading)
        offers = forced | self._make_offers(wanting)
        for work in seats:
            work.by_network = work.max_draft
        self._in_rounds.copies.share(wanting, drafter)
        read_along = self._catch_up(seats) if drafter in self._rounds.readers else []
        extra = [*read_along, *self._hearing.catch_up(seats, drafter)]
        chunks = [self._chunk(work, drafter) for work in reading]
        for work in reading:
            work.sequence.in_flight.launch(work.count, work.samples, 0, offered=False)
        for work in seats:
            offered = work.forced or work.drafted_from >= 0 or not work.by_network  # a copy reads no states
            work.sequence.in_flight.launch(0, True, work.max_draft, offered=offered)
        ticket = self._rounds.launch(
            [*extra, *chunks],
            self._seats(seats, offers, drafter),
            drafter=drafter,
            context=max([len(work.sequence.tokens) + work.sequence.in_flight.most for work in works]),
            masked=masked,
        )
        planned = None if self._observed_at is None else self._clock() - self._observed_at
        launched = Launched(
            plan, ticket, drafter, reading, seats, extra=len(extra), masked=bool(masked), planned=planned
        )
        self._launched.append(launched)
        if masked:
            self._undrawn = launched

    def _draw(self) -> None:
        """Send the masks of the step that lacks them, once all steps before it have landed."""
        launched = self._undrawn
        if launched is None or launched is not self._launched[0]:
            return
        for work in self._masks.draw(launched.ticket, launched.seats):
            work.void = True
            work.sequence.in_flight.void(draws=True, max_draft=work.max_draft)
        self._undrawn = None

    def _seats(self, works: Seq[Work], offers: Mapping[int, Offer], drafter: str | None) -> list[Seat]:
        """Make the seats of works; if nothing has changed, a seat is that of the sequence's step before."""
        price = self._governor.seat_price(drafter) if drafter is not None else 0.0
        by = drafter_of(self._rounds.drafters.get(drafter or ""), len(works), self._rounds.max_draft)
        tree, reads = drafts_trees(by), self._drafters.reads
        if self._kept_for != (price, tree):
            self._kept_for = price, tree
            self._kept_seats.clear()
        kept, seats = self._kept_seats, []
        for work in works:
            key = work.sequence.key
            offer, tapped, seat = offers.get(key), reads(work.sequence), kept.get(key)
            wanted = work.by_network, offer, tapped, work.max_copy, work.sure
            if seat is None or (seat.max_draft, seat.offer, seat.tapped, seat.max_copy, seat.sure) != wanted:
                kept[key] = seat = _seat(work, offer, price, tree=tree, tapped=tapped)
            seats.append(seat)
        return seats

    def _write(self, sequence: Sequence) -> None:
        """Write to the device what it lacks: the whole sequence, or its new pages."""
        state, span = sequence.in_flight, sequence.span
        assert span is not None
        if not state.on_device:
            assert not state.most, "a lane is rewritten under a step in flight"
            tokens = self._lanes.view(sequence.lane, len(sequence.tokens)).copy()
            if state.pages:
                self._rounds.cut(sequence.lane, tokens, sequence.sampler, self._hearing.unread(sequence))
            else:
                self._rounds.write(sequence.lane, tokens, sequence.sampler, sequence.request.prediction)
            state.on_device = True
        if state.pages < len(span.pages):
            self._rounds.set_pages(sequence.lane, state.pages, span.pages[state.pages :])
            state.pages = len(span.pages)

    def _choose_drafter(self, wanting: Seq[Work], seats: Seq[Work], reading: Seq[Work]) -> str | None:
        """Pick the device's drafter of this step, round-robin; sequences of its other drafters decode plainly. If none
        drafts, pick one that has prompt tokens or hidden states to read. `wanting`: seats that want a draft."""
        names = dict.fromkeys([work.drafter for work in wanting])
        wanted = [name for name in names if name in self._rounds.drafters]
        if not wanted:
            readers = [work for work in reading if work.sequence.drafter in self._readers]
            readers += [work for work in seats if work.sequence.drafter in self._rounds.tapping]
            return readers[0].sequence.drafter if readers else None
        self._turn += 1
        chosen = wanted[self._turn % len(wanted)]
        for work in wanting if len(wanted) > 1 else ():
            if work.drafter != chosen and work.drafter in wanted:
                work.go_plain(Off(OffKind.OTHER_TURN, f"it is the turn of drafter {chosen}"))
        return chosen

    def _make_offers(self, wanting: Seq[Work]) -> dict[int, Offer]:
        """Ask the drafters on the host for works that want a draft and have no drafter on the device."""
        works = [work for work in wanting if work.drafter not in self._rounds.drafters]
        works = [work for work in works if self._drafters.may_ask(work)]
        return self._offers.make(works, free=self._step_seconds if self._launched else 0.0) if works else {}

    def _catch_up(self, seats: Seq[Work]) -> list[Chunk]:
        """Make chunks with which the drafter reads its missing positions of sequences that want a draft. A sequence
        whose missing positions do not fit into the step decodes plainly."""
        chunks, room = [], self._max_step_tokens
        for work in seats:
            if not work.max_draft or work.forced or work.drafter not in self._readers:
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
            sequence.in_flight.heard = end
        return Chunk(
            sequence.lane,
            work.start,
            work.count,
            draws=work.samples,
            drafts=along,
            scored=work.scored,
            top=sequence.request.sampling.prompt_logprobs or 0,
            states=0 if sequence.pool is None else sequence.pool.wanted(work.start, work.count),
            tapped=self._drafters.reads(sequence),
            mask=sequence.sampler.mask() if work.samples and sequence.sampler.grammar is not None else None,
        )

    def _settle(self, work: Work, landed: Landed) -> None:
        """Set draft, verdict, scores and states of a work from its outcome."""
        path, drafted, tokens, parents, work.scores, work.prompt_scores, work.states, work.features, match = landed
        if not tokens:
            return
        if match is not None:
            self._in_rounds.copies.learn(work, landed)
        sequence = work.sequence
        length = len(sequence.tokens)
        if work.by_network and not work.forced and work.drafter is not None:
            follower = sequence.in_flight.follower
            if work.drafter in self._rounds.readers and follower is not None:
                # The drafter has read its drafted tokens but the last one; the accepted ones among them stay valid.
                follower.reach(length + min(len(path), work.by_network - 1))
            elif (drafted if match is None else match.drafted) and work.drafter in self._hearing.heads:
                self._hearing.reach(sequence, length - 1, work.drafter)
        work.drafted = len(drafted)
        work.predicted = not work.forced and sequence.predicts(drafted, by=work.drafter)
        work.depth = Draft(drafted, parents).depth if parents else work.drafted
        work.start = length - work.count  # where it was planned, no draft was known yet
        work.verdict, work.tokens, work.in_place = Verdict(path, tokens[-1]), tokens, True

    def _check(self, work: Work, landed: Landed, drafter: str | None) -> Landed:
        """Cut tokens that were drawn without masks before the first that the grammar does not allow. The last one that
        is left counts as the target's own. The work is void if none is left. `drafter`: of the step."""
        sequence, count = work.sequence, self._masks.check(work, landed.tokens)
        if count == len(landed.tokens):
            return landed
        same = all(step.drafter == drafter for step in self._launched)
        for later in (each for step in self._launched for each in step.seats if each.sequence is sequence):
            later.void = True
            sequence.in_flight.void(draws=True, max_draft=later.max_draft)
        sequence.in_flight.cut(len(sequence.tokens) + count, held_for=drafter if same else None)
        work.void = not count
        return landed.cut(count)

    def _observe_draft(self, works: Seq[Work], drafter: str | None, times: Times) -> None:
        """Tell the cost model how long the drafts of a step took."""
        if drafter is None:
            return
        drafted = sum([work.drafted for work in works if work.drafter == drafter])
        if drafted and any(work.by_network for work in works):
            self._governor.cost.observe_draft(drafter, tokens=drafted, depth=drafted, seconds=times.draft)


def _seat(work: Work, offer: Offer | None, price: float, *, tree: bool, tapped: bool) -> Seat:
    sequence = work.sequence
    speculation, sampler = sequence.request.speculation, sequence.sampler
    rule = in_use(speculation.rule)
    # A greedy drafter has no distributions, and one that knows no grammar has others than the masked ones. The coupled
    # rule leaves the distribution unchanged, too. Trees have no distributions either.
    one_way = sampler.greedy or sampler.grammar is not None
    if (rule.wants_probs and (tree or one_way)) or (rule.lossless and one_way):
        rule = Rule.COUPLED
    if rule.wants_confidence and (tree or offer is not None):
        rule = Rule.THRESHOLD  # nobody knows how sure the drafter was
    least = 0.0 if rule.threshold is None else speculation.min_likelihood
    asked = sequence.lane, work.by_network, offer, price, rule, least, speculation.p_min, tapped
    return Seat(*asked, max_copy=work.max_copy, sure=work.sure)
