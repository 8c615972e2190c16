"""The engine: one step is plan, draft, verify, accept, commit, emit, over whatever sequences there are.

Where a device can draft, verify and accept by itself, a step is launched and its outcome is committed and emitted while
the next one runs (`engine.flight`); a sequence that ends has then had at most one step too many, whose outcome is
dropped. What a device cannot do is done with the host in between (`engine.host_step`), after everything in the air has
landed.

Single-threaded by contract: one thread submits, aborts and steps. Every sequence ends in exactly one event with
`finish` set, also when a step fails: then all end with an error and the engine is dead.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.drafters.prediction import PREDICTION
from paceline.engine import emission
from paceline.engine.admission import Admission, grammars_of
from paceline.engine.flight import DEPTH, Flights
from paceline.engine.governor import Governor
from paceline.engine.host_step import HostStep, final_rows
from paceline.engine.probe import Probes
from paceline.engine.scheduler import Scheduler, StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.engine.stats import EngineStats, Snapshot
from paceline.errors import EngineDead, InvalidRequest
from paceline.kernels.base import Forward, Output
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.runner.rounds import Rounds
from paceline.tokenizer import Tokenizer
from paceline.types import Finish, Grammar, Logprob, Request, TokenEvent, Verdict

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
        eos_ids: Seq[int] = (),
        drafters: Mapping[str, Guard] | None = None,
        default_drafter: str | None = None,
        tokenizer: Tokenizer | None = None,
        rounds: Rounds | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """With `rounds` steps run on a device wherever all that is running can; it must know the drafters by the same
        names, and may know more than there are on the host."""
        self.drafters = dict(drafters or {})
        self.stats = EngineStats(synthetic_acceptance=config.synthetic_acceptance)
        self.dead: str | None = None
        self.max_draft = config.max_draft  # tokens of the longest draft
        self._lanes = lanes
        self._cache = cache
        self._clock = clock
        self._admission = Admission(
            vocab_size=forward.vocab_size,
            max_context=max_context,
            eos_ids=frozenset(eos_ids),
            drafters={*self.drafters, *(rounds.drafters if rounds else ())},
            default_drafter=default_drafter,
            tokenizer=tokenizer,
            grammars=grammars_of(tokenizer, vocab_size=forward.vocab_size, eos_ids=eos_ids) if tokenizer else None,
        )
        self._governor = Governor(config, self.drafters, max_context=max_context, rounds=rounds)
        self._host = HostStep(forward, lanes=lanes, drafters=self.drafters, governor=self._governor, clock=self._clock)
        self._flights = self._open_skies(config, rounds)
        self._scheduler = Scheduler(config, lanes=lanes, cache=cache, governor=self._governor, knows=self._host.knows)
        self.probes = Probes(forward, lanes, cache, self._admission, max_step_tokens=config.max_step_tokens)
        self._events: list[TokenEvent] = []  # not yet handed out
        self._open: dict[str, int] = {}  # request id → sequences that have not ended

    def submit(self, request: Request) -> None:
        """Queue a request; its events come out of later steps. Raises InvalidRequest if no step could serve it."""
        if self.dead is not None:
            raise EngineDead(f"the engine stopped after an error ({self.dead}); start it anew")
        if request.id in self._open:
            raise InvalidRequest(f"request id {request.id!r} is in use: choose another, or wait for its end")
        self._scheduler.waiting.extend(self._admission.sequences(request, now=self._clock()))
        self._open[request.id] = request.sampling.n

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest if no step could serve it. May be called from any thread: it reads nothing that changes,
        but compiles a grammar that is not known yet."""
        self._admission.check(request)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequest if it cannot be used. May take half a second, and may be called from any thread: a
        request with this grammar is then submitted at once."""
        self._admission.check_grammar(grammar)

    def abort(self, request_id: str) -> None:
        """End every sequence of the request; one that is not known has already ended."""
        for sequence in self._sequences():
            if sequence.request.id == request_id:
                self._events.append(self._end(sequence, Finish.ABORT))

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting or scheduler.leaving or self._events)

    @property
    def max_sequences(self) -> int:
        """How many run at once; more wait."""
        return len(self._lanes.lengths)

    @property
    def default_drafter(self) -> str | None:
        return self._admission.default_drafter

    def snapshot(self) -> Snapshot:
        """How things stand, for others to read later: a copy."""
        running, waiting, pool = self._scheduler.running, self._scheduler.waiting, self._cache.pool
        reasons = Counter(sequence.off_reason for sequence in running if sequence.off_reason is not None)
        return Snapshot(
            engine=replace(self.stats),
            running=len(running),
            waiting=len(waiting),
            pages_held=pool.held,
            pages_total=pool.num_pages,
            drafters={name: self._out(name) for name in sorted(self._admission.drafters)},
            off_reasons=dict(reasons),
        )

    def _out(self, name: str) -> str | None:
        """Why a drafter is out of use. One that a device has alone never is."""
        return self.drafters[name].out if name in self.drafters else None

    def check(self) -> None:
        """Raise AssertionError if the KV cache is inconsistent or pages are held by nobody. For tests and idle time."""
        self._cache.check()
        holders = self._scheduler.running or self._scheduler.leaving
        assert holders or not self._cache.pool.held, f"{self._cache.pool.held} pages held by nobody"

    def step(self) -> list[TokenEvent]:
        try:
            self._step()
        except Exception as error:  # whatever it was, nobody may wait for ever
            logger.exception("the engine failed")
            self.dead = f"{type(error).__name__}: {error}"
            self._abandon_flights()
            for sequence in self._sequences():
                self._events.append(self._end(sequence, Finish.ERROR))
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        began = self._clock()
        self._expire(began)
        self._admit()
        if self._flights is not None and all(map(self._flights.carries, self._scheduler.running)):
            self._fly(self._flights, began)
        else:
            self._land_all()
            self._step_on_host(began)

    def _fly(self, flights: Flights, began: float) -> None:
        """Launch a step and land the one before it; with nothing to launch, land what is in the air."""
        plan = self._plan()
        if not all(flights.carries(work.sequence) for work in plan.works):
            # For lack of pages all flights landed, and with the tokens that they brought a prediction goes on.
            self._step_on_host(began)
            return
        if plan.works:
            flights.launch(plan.works)
            self.stats.count_launch(self._clock() - began)
        if len(flights) > (DEPTH if plan.works else 0):
            self._land(flights)

    def _land(self, flights: Flights) -> None:
        began = self._clock()
        landing = flights.land()
        for sequence in landing.ended:
            self._scheduler.release(sequence)
        works, times = [work for work, _ in landing.works], landing.times
        rows = self._charge(works, draft=times.draft, verify=times.verify)
        for work, verdict in landing.works:
            tokens = self._commit(work, verdict)
            self._emit(work, verdict, tokens, None)
        self.stats.wasted += landing.wasted
        self.stats.count_landing(times, waited=landing.waited, seconds=self._clock() - began)
        if landing.decodes and times.step:
            drafted = sum(len(work.draft) for work in works)
            if landing.drafter is not None and drafted:
                self._governor.cost.observe_draft(landing.drafter, tokens=drafted, depth=drafted, seconds=times.draft)
            verdicts = [verdict for _, verdict in landing.works if verdict]
            self._measure(verdicts, rows, step=times.step, draft=times.draft, verify=times.verify)

    def _land_all(self) -> None:
        while self._flights:
            self._land(self._flights)

    def _step_on_host(self, began: float) -> None:
        clock, host = self._clock, self._host
        plan = self._plan()
        if not plan.works:
            return
        planned = clock()
        host.draft(plan)
        drafted = clock()
        output = host.verify(plan)
        verified = clock()
        verdicts = host.accept(plan, output)
        accepted = clock()
        draft, verify = drafted - planned, verified - drafted
        rows = self._charge(plan.works, draft=draft, verify=verify)
        for work in plan.works:
            verdict = verdicts.get(work.sequence.key)
            tokens = self._commit(work, verdict)
            work.sequence.air.aboard = False  # the device has not seen this step
            self._emit(work, verdict, tokens, output)
            if verdict is not None:
                host.observe(work, verdict)
        host.feed(plan, verdicts, output)
        ended = clock()
        self.stats.count(planned - began, draft, verify, accept=accepted - verified, emit=ended - accepted)
        if plan.decodes:
            self._measure([*verdicts.values()], rows, step=ended - began, draft=draft, verify=verify)

    def _measure(self, verdicts: Seq[Verdict], rows: int, *, step: float, draft: float, verify: float) -> None:
        """What a step cost in which every sequence was decoding."""
        tokens = len(verdicts)
        for verdict in verdicts:
            tokens += len(verdict.path)
        self._governor.cost.observe(
            sequences=len(verdicts),
            rows=rows,
            tokens=tokens,
            pass_seconds=verify,
            step_seconds=step,
            draft_seconds=draft,
        )

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            sequence.counters.count_admission(now=self._clock())
            self._host.start(sequence)
            if self._flights is not None:
                self._flights.enter(sequence)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        if plan.falls_short:
            self._land_all()
            plan = self._scheduler.plan()
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            self._host.stop(sequence)
        return plan

    def _commit(self, work: Work, verdict: Verdict | None) -> list[int]:
        """Make what was computed and accepted final, forget the rest. Returns the new tokens."""
        sequence, span = work.sequence, work.sequence.span
        assert span is not None
        path: Seq[int] = ()
        tokens: list[int] = []
        if verdict is not None:
            path = verdict.path
            tokens = [*map(work.draft.tokens.__getitem__, path), verdict.token]
            self._lanes.commit(sequence.lane, len(sequence.tokens), tokens)
        self._cache.commit(span, self._lanes.texts[sequence.lane], final_rows(work.count, path))
        return tokens

    def _emit(self, work: Work, verdict: Verdict | None, tokens: list[int], output: Output | None) -> None:
        """`output` is None where the step ran on a device."""
        sequence = work.sequence
        if sequence.wants_prompt_logprobs and output is not None:
            emission.score_prompt(work, output)
        if verdict is None:
            return
        kept, text = emission.keep(sequence, tokens)
        # Before the tokens grow: the work speaks of those it had.
        logprobs = () if output is None else emission.score(work, verdict, kept, output)
        sequence.extend(kept)
        self._learn(work, verdict, len(kept))
        if sequence.finish is None:
            sequence.choose_drafter()
        event = TokenEvent(
            request_id=sequence.request.id,
            sample=sequence.sample,
            tokens=tuple(kept),
            origins=emission.origins(work, verdict, len(kept)),
            drafter=work.drafter if work.draft.tokens and not work.forced else None,
            drafted=len(work.draft.tokens),
            accepted=len(verdict.path),
            text=text,
            logprobs=logprobs,
            prompt_logprobs=_prompt_scores(sequence) if sequence.counters.steps == 1 else None,
        )
        self._events.append(event if sequence.finish is None else self._end(sequence, sequence.finish, event))

    def _learn(self, work: Work, verdict: Verdict, kept: int) -> None:
        """Count what came of the step, and tell the governor."""
        sequence, drafted, accepted = work.sequence, len(work.draft.tokens), len(verdict.path)
        sequence.counters.count_step(drafted, accepted, now=self._clock())
        self.stats.output_tokens += kept
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        if drafted and not work.forced and sequence.finish is None:
            self._governor.learn(sequence, drafter=work.drafter, drafted=work.draft.depth, accepted=accepted)
        if work.drafter == PREDICTION and not work.forced:
            sequence.counters.prediction_accepted += min(accepted, kept)
            sequence.counters.prediction_rejected += drafted - accepted

    def _end(self, sequence: Sequence, finish: Finish, event: TokenEvent | None = None) -> TokenEvent:
        """Free everything the sequence holds and make its last event, out of `event` where there is one."""
        if sequence.lane >= 0:
            self._host.stop(sequence)
        self._scheduler.leave(sequence)
        self._open[sequence.request.id] -= 1
        if not self._open[sequence.request.id]:
            del self._open[sequence.request.id]
        self.stats.finished += 1
        if event is None:
            held = "" if sequence.stream is None else sequence.stream.flush()
            event = TokenEvent(request_id=sequence.request.id, sample=sequence.sample, text=held)
        return replace(
            event,
            finish=finish,
            stop=sequence.stopped_by,
            error=self.dead or sequence.error if finish is Finish.ERROR else None,
            prompt_logprobs=_prompt_scores(sequence),
            stats=sequence.stats(now=self._clock()),
        )

    def _expire(self, now: float) -> None:
        for sequence in self._sequences():
            if sequence.deadline is not None and now > sequence.deadline:
                self._events.append(self._end(sequence, Finish.DEADLINE))

    def _sequences(self) -> list[Sequence]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _abandon_flights(self) -> None:
        if self._flights is not None:
            self._flights.abandon([*self._scheduler.running, *self._scheduler.leaving])
            for sequence in [*self._scheduler.leaving]:
                self._scheduler.release(sequence)

    def _open_skies(self, config: EngineConfig, rounds: Rounds | None) -> Flights | None:
        if rounds is None:
            if config.synthetic_acceptance:
                raise InvalidRequest("synthetic_acceptance needs a device that runs rounds by itself: leave it at 0")
            return None
        rounds.synthetic_acceptance = config.synthetic_acceptance
        return Flights(
            rounds,
            drafters=self.drafters,
            pool=self._cache.pool,
            max_step_tokens=config.max_step_tokens,
            clock=self._clock,
        )

    def _charge(self, works: Seq[Work], *, draft: float, verify: float) -> int:
        """Share the time of the step by rows; returns how many there were."""
        rows = 0
        for work in works:
            rows += work.rows
        self.stats.rows += rows
        for work in works:
            share, counters = work.rows / rows, work.sequence.counters
            counters.time_draft += draft * share
            counters.time_verify += verify * share
        return rows


def _prompt_scores(sequence: Sequence) -> tuple[Logprob | None, ...] | None:
    return tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None
