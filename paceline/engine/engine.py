"""The engine: expire, admit, plan, launch, land, commit and emit, once in each step.

A stepper drafts, verifies and accepts (`engine.stepper`): on the host, or on a device that runs one step while the next
one is planned. A sequence that ends while in flight has run at most one step too many; its outcome is dropped.

Single-threaded by contract: one thread submits, aborts and steps. Every sequence ends in exactly one event with
`finish` set, also when a step fails: then all end with an error and the engine is dead.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine import emission
from paceline.engine.accounting import Accounting
from paceline.engine.admission import Admission, grammars_of
from paceline.engine.device import DeviceStepper
from paceline.engine.draft_rules import judge_drafts
from paceline.engine.governor import Governor
from paceline.engine.host import HostStepper
from paceline.engine.host_drafters import HostDrafters
from paceline.engine.pass_meter import PassMeter
from paceline.engine.probe import Probes
from paceline.engine.reading import ReadingPace
from paceline.engine.scheduler import Scheduler, StepPlan
from paceline.engine.sequence import Sequence
from paceline.engine.shadow import Shadow
from paceline.engine.stats import EngineStats, Snapshot
from paceline.engine.stepper import Landing, Stepper
from paceline.engine.truth import NOT_MEASURED
from paceline.errors import EngineDead, InvalidRequest
from paceline.kernels.base import Forward
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import Rounds
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, Grammar, Request, TokenEvent

logger = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        forward: Forward,
        *,
        config: EngineConfig,
        lanes: Lanes,
        cache: KVCache,
        max_context: int,
        even_context: float = math.inf,
        eos_ids: Seq[int] = (),
        drafters: Mapping[str, Guard] | None = None,
        default_drafter: str | None = None,
        tokenizer: Tokenizer | None = None,
        rounds: Rounds | None = None,
        watch: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`even_context`: see ReadingPace. `watch` raises if the engine lost a process that it needs.

        With `rounds`, a step runs on a device if the device can run every sequence. A drafter has the same name in
        `drafters` and in `rounds`; either may have drafters that the other lacks."""
        self.drafters = dict(drafters or {})
        self.stats = EngineStats(synthetic_acceptance=config.synthetic_acceptance)
        self.dead: str | None = None
        self.failure: Exception | None = None  # that the engine died of
        self.max_draft = config.max_draft  # tokens of the longest draft
        self.drafter_timeout = config.drafter_timeout  # seconds
        self.is_hot = rounds is None  # drafters may be added and removed while it runs
        self._lanes = lanes
        self._cache = cache
        self._clock = clock
        self.watch = watch
        self._admission = Admission(
            vocab_size=forward.vocab_size,
            max_context=max_context,
            eos_ids=frozenset(eos_ids),
            drafters={*self.drafters, *(rounds.drafters if rounds else ())},
            predictors=[name for name, guard in self.drafters.items() if guard.needs_prediction],
            default_drafter=default_drafter,
            tokenizer=tokenizer,
            grammars=grammars_of(tokenizer, vocab_size=forward.vocab_size, eos_ids=eos_ids) if tokenizer else None,
        )
        governor = Governor(config, self.drafters, max_context=max_context, rounds=rounds)
        self.fixed_drafts = governor.fixed  # for measurements: within its block, drafts are as `fixed_draft` says
        self._governor = governor
        self._gathers = rounds is not None and rounds.timed  # else the times of prompts are not known
        self._stepper = self._make_stepper(forward, governor, config, rounds)
        self._scheduler = Scheduler(
            config,
            lanes=lanes,
            cache=cache,
            governor=governor,
            pace=ReadingPace(even_context=even_context),
            knows=self._stepper.knows,
            ready=self._stepper.ready,
        )
        self._accounting = Accounting(self.stats, governor, clock)
        self.probes = Probes(forward, lanes, cache, self._admission, max_step_tokens=config.max_step_tokens)
        self._meter = PassMeter(self.probes, governor.cost, clock) if governor.weighs_rows else None
        self.shadow = Shadow(self.probes, self.drafters, governor, clock, max_draft=config.max_draft)
        self._events: list[TokenEvent] = []  # not yet handed out
        self._open: dict[str, int] = {}  # request id → sequences that have not ended

    def submit(self, request: Request, *, validated: bool = False) -> None:
        """Queue a request; its events come out of later steps. Raises InvalidRequest if no step could serve it.

        `validated`: the caller has already called `validate` with this request."""
        if self.dead is not None:
            raise EngineDead(f"the engine stopped after an error ({self.dead}); start it anew")
        if request.id in self._open:
            raise InvalidRequest(f"request id {request.id!r} is in use: choose another, or wait for its end")
        if not validated:
            self.validate(request)
        self.shadow.leave()
        self._scheduler.waiting.add(self._admission.sequences(request, now=self._clock()))
        self._open[request.id] = request.sampling.n

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest if no step could serve the request. May be called from any thread: it reads
        only constant state, and compiles the grammar if it is new."""
        self._admission.check(request)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequest if the grammar cannot be used. May be called from any thread, and may take half a second
        to compile; `submit` of a request with this grammar is then fast."""
        self._admission.check_grammar(grammar)

    def abort(self, request_id: str) -> None:
        """End every sequence of the request; an unknown request has already ended."""
        for sequence in self._sequences():
            if sequence.request.id == request_id:
                self._events.append(self._end(sequence, Finish.ABORT))

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting.count or scheduler.leaving or self._events)

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences that run at once; further ones wait."""
        return len(self._lanes.lengths)

    @property
    def default_drafter(self) -> str | None:
        return self._admission.default_drafter

    @default_drafter.setter
    def default_drafter(self, name: str | None) -> None:
        """Choose the drafter of later requests that name none; None: they decode plainly."""
        assert name is None or name in self._admission.drafters, f"{name} is not loaded"
        self._admission.default_drafter = name

    def add_drafter(self, name: str, guard: Guard) -> None:
        """Take in a drafter between two steps; requests may name it from now on."""
        assert self.is_hot, "a device has recorded its drafters"
        assert name not in self.drafters, f"{name} is loaded already"
        self.drafters[name] = guard
        self._host_drafters.join(name, guard)
        self._admission.drafters = {*self._admission.drafters, name}  # a new set: other threads read it

    def remove_drafter(self, name: str) -> None:
        """Let a drafter go between two steps. Its sequences go on with the default drafter if that one reads no hidden
        states, which are gone; otherwise plainly."""
        assert self.is_hot, "a device has recorded its drafters"
        assert name != self.default_drafter, f"{name} is the default"
        self.shadow.leave()
        default = self.default_drafter
        successor = default if default is not None and not self.drafters[default].taps else None
        for sequence in self._sequences():
            if name in sequence.drafters:
                self._take_from(sequence, name, successor)
        self._admission.drafters = {*self._admission.drafters} - {name}
        self._host_drafters.leave(name)
        self._governor.forget(name)
        self.drafters.pop(name).close()

    def _take_from(self, sequence: Sequence, name: str, successor: str | None) -> None:
        """Replace a drafter of a sequence; one that runs starts with the tokens that it has."""
        if sequence.lane >= 0:
            self._stepper.stop(sequence)
        sequence.lose(name, successor=successor)
        if sequence.lane >= 0:
            self._stepper.start(sequence)

    def snapshot(self) -> Snapshot:
        """Copy the engine's state, for other threads to read."""
        running, waiting, pool = self._scheduler.running, self._scheduler.waiting, self._cache.pool
        reasons = Counter(sequence.off.detail for sequence in running if sequence.off is not None)
        return Snapshot(
            engine=replace(self.stats),
            running=len(running),
            waiting=waiting.count,
            pages_held=pool.held,
            pages_total=pool.num_pages,
            drafters={name: self._out(name) for name in sorted(self._admission.drafters)},
            off_reasons=dict(reasons),
            drafting=dict(Counter(each.drafting for each in running if each.drafting and each.off is None)),
            measurement=None if self._governor.truth is None else self._governor.truth.measurement(),
            prices={name: self._governor.prices(name) for name in self._admission.drafters},
            tenants=waiting.loads(),
        )

    def _out(self, name: str) -> str | None:
        """Return why a drafter is out of use; None: it is in use, as drafters that only the device has always are."""
        return self.drafters[name].out if name in self.drafters else None

    def check(self) -> None:
        """Raise AssertionError if the KV cache is inconsistent, or holds pages of no sequence while idle."""
        self.shadow.leave()
        self._cache.check()
        holders = self._scheduler.running or self._scheduler.leaving
        assert holders or not self._cache.pool.held, f"{self._cache.pool.held} pages are held by no sequence"

    def improve(self) -> bool:
        """Use a moment without work to make later steps faster, for a fraction of a second. False: nothing is left to
        do."""
        if self.dead is not None or self.has_work:
            return False
        meter = self._meter
        return self._stepper.improve() or (meter is not None and meter.improve()) or self.shadow.improve()

    def step(self) -> list[TokenEvent]:
        try:
            self._step()
        except Exception as error:  # of any kind: no request may wait for ever
            logger.exception("the engine failed")
            self.die(error)
        events, self._events = self._events, []
        return events

    def die(self, error: Exception) -> None:
        """End every sequence with an error, for good."""
        self.dead, self.failure = f"{type(error).__name__}: {error}", error
        self._abandon()

    def _step(self) -> None:
        self._expire(self._accounting.begin())
        self._admit()
        plan = self._plan()
        self._stepper.launch(plan)
        if self._gathers and plan.works:
            self._scheduler.gathering.launched(0 if plan.decodes else plan.prompt_rows)
        self._land(plan.depth)

    def _expire(self, now: float) -> None:
        """End sequences whose deadline is over, and those that the stepper found complete or stuck since their step."""
        for sequence in self._sequences():
            if sequence.finish is not None:
                self._events.append(self._end(sequence, sequence.finish))
            elif sequence.deadline is not None and now > sequence.deadline:
                self._events.append(self._end(sequence, Finish.DEADLINE))

    def _admit(self) -> None:
        for sequence in self._scheduler.admit() if self._scheduler.waiting.count else ():
            sequence.counters.count_admission(now=self._clock())
            self._stepper.start(sequence)

    def _plan(self) -> StepPlan:
        """Plan a step. If pages are short, land all steps in flight first."""
        plan = self._scheduler.plan()
        if plan.falls_short:
            self._land(0)
            plan = self._scheduler.plan()
        plan.depth = self._stepper.depth if plan.works else 0
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            self._stepper.stop(sequence)
        return plan

    def _land(self, depth: int) -> None:
        """Wait for steps until at most `depth` are in flight; commit and emit their outcomes."""
        self._accounting.planned()
        while self._stepper.in_flight > depth:
            landing = self._stepper.land()
            self._accounting.charge(landing)
            if self._gathers:
                self._scheduler.gathering.landed(read=landing.times.read, step=landing.times.step)
            if not landing.decodes:
                self._learn_reading(landing)
            self._commit(landing)
            self._emit(landing)
            self._accounting.measure(landing, busy=self._stepper.in_flight > 0)
            self._stepper.observe(landing)
            self._accounting.emitted(landing)

    def _learn_reading(self, landing: Landing) -> None:
        """Tell the scheduler how long the prompts of a step took: by the device's clock, or by their share of rows."""
        chunks = [(work.start, work.count) for work in landing.works if not work.decodes]
        if chunks and not landing.wasted:
            share = sum(count for _, count in chunks) / sum(work.rows for work in landing.works)
            self._scheduler.pace.learn(chunks, landing.times.read or landing.times.verify * share)

    def _commit(self, landing: Landing) -> None:
        """Make computed and accepted rows final in lanes and KV cache, and free sequences that ended in flight."""
        for sequence in landing.ended:
            self._scheduler.release(sequence)
        for work in landing.works:
            sequence, verdict, lane = work.sequence, work.verdict, work.sequence.lane
            assert sequence.span is not None
            if verdict is not None:
                if not work.in_place:
                    work.tokens = [*map(work.draft.tokens.__getitem__, verdict.path), verdict.token]
                self._lanes.commit(lane, len(sequence.tokens), work.tokens)
            if work.in_place and verdict is not None:
                self._cache.extend(sequence.span, self._lanes.texts[lane], work.count + len(verdict.path))
            else:
                self._cache.commit(sequence.span, self._lanes.texts[lane], work.final_rows())

    def _emit(self, landing: Landing) -> None:
        """Hand out the new tokens, and end the sequences that are complete."""
        for work in landing.works:
            sequence = work.sequence
            if sequence.needs_prompt_rows:
                emission.take_prompt(work)
            if work.verdict is None:
                continue
            kept, text = emission.keep(sequence, work.tokens)
            sequence.extend(kept)
            self._accounting.count_tokens(work, len(kept))
            if sequence.finish is None and sequence.trail is not None:
                sequence.choose_drafter(sequence.trail)
            event = emission.event(work, work.verdict, kept, text)
            self._events.append(event if sequence.finish is None else self._end(sequence, sequence.finish, event))

    def _end(self, sequence: Sequence, finish: Finish, event: TokenEvent | None = None) -> TokenEvent:
        """Free everything the sequence holds, and return its last event: `event` if a step made one, else a new one."""
        if sequence.lane >= 0:
            self._stepper.stop(sequence)
        if finish in (Finish.STOP, Finish.LENGTH):
            self.shadow.keep(sequence)
        self._scheduler.leave(sequence)
        self._open[sequence.request.id] -= 1
        if not self._open[sequence.request.id]:
            del self._open[sequence.request.id]
        self.stats.finished += 1
        if event is None:
            held = "" if sequence.stream is None else sequence.stream.flush()
            event = TokenEvent(request_id=sequence.request.id, sample=sequence.sample, text=held)
        truth = self._governor.truth
        speedup, unmeasured = NOT_MEASURED if truth is None else truth.of(sequence)
        return event._replace(
            finish=finish,
            stop=sequence.stopped_by,
            error=self.dead or sequence.error if finish is Finish.ERROR else None,
            prompt_logprobs=emission.prompt_scores(sequence),
            embedding=None if sequence.pool is None else sequence.pool.embedding(),
            stats=sequence.stats(now=self._clock(), speedup=speedup, unmeasured=unmeasured),
        )

    def _sequences(self) -> list[Sequence]:
        scheduler = self._scheduler
        return scheduler.running + scheduler.waiting.sequences() if scheduler.waiting.count else [*scheduler.running]

    def _abandon(self) -> None:
        """End every sequence with an error: the engine is dead, and nothing in flight will land."""
        self._stepper.abandon([*self._scheduler.running, *self._scheduler.leaving])
        for sequence in [*self._scheduler.leaving]:
            self._scheduler.release(sequence)
        for sequence in self._sequences():
            self._events.append(self._end(sequence, Finish.ERROR))

    def _make_stepper(
        self, forward: Forward, governor: Governor, config: EngineConfig, rounds: Rounds | None
    ) -> Stepper:
        inside = () if rounds is None else rounds.drafters
        guards = {name: guard for name, guard in self.drafters.items() if name not in inside}
        self._host_drafters = drafters = HostDrafters(
            guards, lanes=self._lanes, governor=governor, taps=forward.taps, waits=rounds is None
        )
        if rounds is None:
            if config.synthetic_acceptance:
                raise InvalidRequest("synthetic_acceptance needs a device that runs rounds by itself: leave it at 0")
            return HostStepper(forward, lanes=self._lanes, drafters=drafters, governor=governor, clock=self._clock)
        rounds.synthetic_acceptance, rounds.judge = config.synthetic_acceptance, judge_drafts
        return DeviceStepper(
            rounds,
            drafters=drafters,
            lanes=self._lanes,
            pool=self._cache.pool,
            governor=governor,
            max_step_tokens=config.max_step_tokens,
            clock=self._clock,
        )
