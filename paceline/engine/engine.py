"""The engine: one step is plan, draft, verify, accept, commit, emit, over whatever sequences there are.

Single-threaded by contract: one thread submits, aborts and steps. Every sequence ends in exactly one event with
`finish` set, also when a step fails: then all end with an error and the engine is dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from paceline.config import EngineConfig
from paceline.drafters.base import Ask
from paceline.drafters.guard import Guard
from paceline.engine import emission
from paceline.engine.admission import Admission
from paceline.engine.governor import Governor
from paceline.engine.judge import judge
from paceline.engine.scheduler import Scheduler, StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead, InvalidRequest
from paceline.kernels.base import Forward, Output
from paceline.kv.cache import KVCache
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.tokenizer import Tokenizer
from paceline.types import Finish, Request, TokenEvent, Verdict

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = dict(drafters or {})
        self.stats = EngineStats()
        self.dead: str | None = None
        self._forward = forward
        self._lanes = lanes
        self._cache = cache
        self._clock = clock
        self._admission = Admission(
            vocab_size=forward.vocab_size,
            max_context=max_context,
            eos_ids=frozenset(eos_ids),
            drafters=self.drafters.keys(),
            default_drafter=default_drafter,
            tokenizer=tokenizer,
        )
        self._governor = Governor(config, self.drafters)
        self._scheduler = Scheduler(config, lanes=lanes, cache=cache, governor=self._governor)
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

    def abort(self, request_id: str) -> None:
        """End every sequence of the request; one that is not known has already ended."""
        for sequence in self._sequences():
            if sequence.request.id == request_id:
                self._events.append(self._end(sequence, Finish.ABORT))

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._events)

    def check(self) -> None:
        """Raise AssertionError if the KV cache is inconsistent or pages are held by nobody. For tests and idle time."""
        self._cache.check()
        assert self._scheduler.running or not self._cache.pool.held, f"{self._cache.pool.held} pages held by nobody"

    def step(self) -> list[TokenEvent]:
        try:
            self._step()
        except Exception as error:  # whatever it was, nobody may wait for ever
            logger.exception("the engine failed")
            self.dead = f"{type(error).__name__}: {error}"
            for sequence in self._sequences():
                self._events.append(self._end(sequence, Finish.ERROR))
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        clock = [self._clock()]
        self._expire(clock[0])
        plan = self._plan()
        if not plan.works:
            return
        clock.append(self._clock())
        self._draft(plan)
        clock.append(self._clock())
        output = self._verify(plan)
        clock.append(self._clock())
        verdicts = self._accept(plan, output)
        clock.append(self._clock())
        self._charge(plan, draft=clock[2] - clock[1], verify=clock[3] - clock[2])
        for work in plan.works:
            verdict = verdicts.get(work.sequence.key)
            tokens = self._commit(work, verdict)
            self._emit(work, verdict, tokens, output)
        clock.append(self._clock())
        self.stats.count(clock)
        if len(verdicts) == len(plan.works) and all(work.count == 1 for work in plan.works):  # nothing but decoding
            self._governor.cost.observe(
                sequences=len(plan.works),
                rows=sum(work.rows for work in plan.works),
                tokens=sum(len(verdict.path) + 1 for verdict in verdicts.values()),
                pass_seconds=clock[3] - clock[2],
                step_seconds=clock[5] - clock[0],
                draft_seconds=clock[2] - clock[1],
            )

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            if sequence.drafter is not None:
                self.drafters[sequence.drafter].stop(sequence.key)
        for sequence in plan.started:
            if sequence.drafter is not None:
                self.drafters[sequence.drafter].start(sequence.key, sequence.lane, self._view(sequence))
        return plan

    def _draft(self, plan: StepPlan) -> None:
        """Ask each drafter once for all its sequences, and put the drafts behind the committed tokens."""
        asking: dict[str, list[Work]] = {}
        for work in plan.works:
            if work.max_draft:
                asking.setdefault(work.sequence.drafter or "", []).append(work)
        for name, works in asking.items():
            began = self._clock()
            drafts = self.drafters[name].propose([self._ask(work) for work in works])
            if all(work.sequence.counters.rounds for work in works):  # else a drafter may have read a whole prompt
                drafted = sum(map(len, drafts))
                self._governor.cost.observe_draft(name, tokens=drafted, seconds=self._clock() - began)
            for work, draft in zip(works, drafts, strict=True):
                work.draft = draft
                length = len(work.sequence.tokens)
                self._lanes.tokens_np[work.sequence.lane, length : length + len(draft)] = draft.tokens

    def _verify(self, plan: StepPlan) -> Output:
        shares, first_out = [], 0
        for work in plan.works:
            shares.append(Share(work.sequence.lane, work.start, work.count, work.draft, work.outs))
            work.first_out = first_out
            first_out += work.outs + len(work.draft)
        return self._forward(build_batch(self._lanes, shares))

    def _accept(self, plan: StepPlan, output: Output) -> dict[int, Verdict]:
        return judge([work for work in plan.works if work.samples], output, self._forward.pick)

    def _commit(self, work: Work, verdict: Verdict | None) -> list[int]:
        """Make what was computed and accepted final, forget the rest. Returns the new tokens."""
        sequence, span = work.sequence, work.sequence.span
        assert span is not None
        rows: list[int] = list(range(work.count))
        tokens: list[int] = []
        if verdict is not None:
            rows += [work.count + node for node in verdict.path]
            tokens = [work.draft.tokens[node] for node in verdict.path] + [verdict.token]
            length = len(sequence.tokens)
            self._lanes.tokens_np[sequence.lane, length : length + len(tokens)] = tokens
            self._lanes.lengths_np[sequence.lane] = length + len(tokens)
        self._cache.commit(span, self._lanes.tokens_np[sequence.lane], rows)
        return tokens

    def _emit(self, work: Work, verdict: Verdict | None, tokens: list[int], output: Output) -> None:
        sequence = work.sequence
        if sequence.wants_prompt_logprobs:
            emission.score_prompt(work, output)
        if verdict is None:
            return
        kept, text = emission.keep(sequence, tokens)
        logprobs = emission.score(
            work, verdict, kept, output
        )  # before the tokens grow: the work speaks of those it had
        sequence.tokens += kept
        sequence.sampler.advance(kept)
        self._learn(work, verdict, len(kept))
        event = TokenEvent(
            request_id=sequence.request.id,
            sample=sequence.sample,
            tokens=tuple(kept),
            origins=emission.origins(work, verdict, len(kept)),
            text=text,
            logprobs=logprobs,
        )
        self._events.append(event if sequence.finish is None else self._end(sequence, sequence.finish, event))

    def _learn(self, work: Work, verdict: Verdict, kept: int) -> None:
        """Count what came of the step, and tell the governor and the drafter."""
        sequence, drafted, accepted = work.sequence, len(work.draft), len(verdict.path)
        sequence.counters.count_step(drafted, accepted, now=self._clock())
        self.stats.output_tokens += kept
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        if drafted and sequence.finish is None:
            self._governor.learn(sequence, drafted=drafted, accepted=accepted)
            self.drafters[sequence.drafter or ""].observe(sequence.key, self._view(sequence), accepted)

    def _end(self, sequence: Sequence, finish: Finish, event: TokenEvent | None = None) -> TokenEvent:
        """Free everything the sequence holds and make its last event, out of `event` where there is one."""
        if sequence.lane >= 0 and sequence.drafter is not None:
            self.drafters[sequence.drafter].stop(sequence.key)
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
            error=self.dead if finish is Finish.ERROR else None,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None,
            stats=sequence.stats(now=self._clock()),
        )

    def _expire(self, now: float) -> None:
        for sequence in self._sequences():
            if sequence.deadline is not None and now > sequence.deadline:
                self._events.append(self._end(sequence, Finish.DEADLINE))

    def _sequences(self) -> list[Sequence]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _view(self, sequence: Sequence) -> np.ndarray:
        """The committed tokens, read-only: drafters are not trusted."""
        view = self._lanes.tokens_np[sequence.lane, : len(sequence.tokens)]
        view.flags.writeable = False
        return view

    def _ask(self, work: Work) -> Ask:
        sequence = work.sequence
        return Ask(
            key=sequence.key,
            lane=sequence.lane,
            tokens=self._view(sequence),
            max_draft=work.max_draft,
            sampler=sequence.sampler,
            rule=sequence.request.speculation.rule,
        )

    def _charge(self, plan: StepPlan, *, draft: float, verify: float) -> None:
        """Share the time of the step by rows."""
        rows = sum(work.rows for work in plan.works)
        self.stats.rows += rows
        for work in plan.works:
            work.sequence.counters.time_draft += draft * work.rows / rows
            work.sequence.counters.time_verify += verify * work.rows / rows
