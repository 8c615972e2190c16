"""Runs the canary of a server: assigns requests to arms, observes how fast they are, promotes or rolls back.

    assign ──▶ engine ──▶ observe ──▶ sums of this server ──sync──▶ state file: sums of all servers ──▶ verdict

All on the event loop; the state file is read and written on a thread. `sync` runs after requests, a few seconds apart,
and at once where a verdict is near or the canary has failed. A server follows what the file says, whoever decided it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import Request as HttpRequest

from paceline.arms import CANARY, CONTROL, Arm
from paceline.engine.hot import NONE
from paceline.errors import InvalidRequest, PacelineError, StorageError
from paceline.server import logs
from paceline.server.bridge import Bridge
from paceline.server.canary.evidence import Evidence, plus
from paceline.server.canary.memory import resident_bytes
from paceline.server.canary.options import CanaryOptions
from paceline.server.canary.store import State
from paceline.server.canary.trial import Phase, Trial
from paceline.server.served_drafters import ServedDrafters
from paceline.types import Finish, Request, Rule, SequenceStats, TokenEvent

SYNC_SECONDS = 2.0  # between two looks at the state file
SHADOW_SECONDS = 30.0  # a canary waits for idle moments of the engine at most, before it gets traffic
SHADOW_TEXTS = 8  # finished texts that it drafts for in the shadow
LEAK_BYTES = 256 << 20  # that a canary's calls may take beyond the KV memory and the weights that it declared


class Canary:
    def __init__(self, bridge: Bridge, drafters: ServedDrafters, *, clock: Callable[[], float] = time.time) -> None:
        self.trial: Trial | None = None  # the canary that runs; None: there is none
        self.past: list[Trial] = []  # those before it, the latest last
        self._bridge, self._drafters, self._clock = bridge, drafters, clock
        self._evidence = Evidence(promote_at=1, rollback_at=1)
        self._fault: str | None = None  # why the canary gets no more requests, before the state says so
        self._stamp = -1  # of the state file when it was last read
        self._synced = 0.0
        self._task: asyncio.Task[None] | None = None
        bridge.listeners.append(self.observe)

    # Assigning.

    def assign(self, http: HttpRequest, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Put requests into the arm that their HTTP request belongs to, where a canary runs and it may draft."""
        self._look()
        trial = self.trial
        if trial is None or trial.phase is not Phase.RUNNING or self._fault or not self._is_there(trial):
            return (*requests,)
        unit = _unit(http, trial)
        if unit is None:
            return (*requests,)
        name = CANARY if trial.takes(unit) else CONTROL
        return tuple(self._in_arm(request, trial, name) if is_open(request) else request for request in requests)

    def _in_arm(self, request: Request, trial: Trial, name: str) -> Request:
        structured = request.sampling.grammar is not None
        kind = self._bridge.llm.kind_of([request.prompt], structured=structured)
        arm = Arm(name, trial.id, f"{kind}, {'greedy' if request.sampling.greedy else 'sampled'}")
        drafter = trial.drafter if name == CANARY else trial.control
        asked = replace(request.speculation, drafter=None if drafter == NONE else drafter, enabled=drafter != NONE)
        return replace(request, arm=arm, speculation=asked)

    def _is_there(self, trial: Trial) -> bool:
        names = {trial.drafter, trial.control} - {NONE}
        return names <= self._bridge.stats().drafters.keys()

    # Observing.

    def observe(self, event: TokenEvent) -> None:
        """Count a request of the canary that has ended."""
        stats, trial = event.stats, self.trial
        if stats is None or stats.arm is None or trial is None or stats.arm.trial != trial.id:
            return
        self._evidence.count(_sums(stats, stats.arm.name))
        if event.sample == 0 and event.finish in (Finish.STOP, Finish.LENGTH):
            self._evidence.add(stats.arm.name, stats.arm.kind, stats.arm_speed)
        self._fault = self._fault or self._failure(trial)
        self._look()

    def _failure(self, trial: Trial) -> str | None:
        """Return what the canary's drafter did wrong; None: nothing."""
        guard = self._bridge.llm.engine.drafters.get(trial.drafter)
        if guard is None:
            return None
        if guard.fault is not None or guard.out is not None:
            return f"its drafter {guard.fault or guard.out}"
        declared = self._declared(trial.drafter)
        if guard.grown > declared + LEAK_BYTES:
            grown, said = guard.grown >> 20, declared >> 20
            return f"its drafter leaks: its calls took {grown} MiB of memory, and {said} MiB are its weights and pages"
        return None

    def _declared(self, name: str) -> int:
        parts = self._bridge.llm.parts
        made = parts.drafters.get(name)
        return 0 if made is None else made.page_bytes * parts.context.pool.num_pages + made.own_bytes

    # Deciding.

    def _look(self) -> None:
        """Synchronise with the state file if it is time to, on a task of its own."""
        idle = self._task is None or self._task.done()
        if idle and (self._is_urgent() or self._clock() - self._synced >= SYNC_SECONDS):
            self._synced = self._clock()
            self._task = asyncio.get_running_loop().create_task(self._sync_or_say())

    def _is_urgent(self) -> bool:
        trial = self.trial
        if trial is None or not self._evidence.totals:
            return False
        merged = replace(trial, totals=plus(trial.totals, self._evidence.totals))
        return trial.phase is Phase.RUNNING and (self._fault is not None or merged.verdict() is not None)

    async def _sync_or_say(self) -> None:
        try:
            await self.sync()
        except PacelineError as error:
            logs.say("canary not synchronised", level=logging.WARNING, reason=str(error))

    async def sync(self) -> None:
        """Add this server's sums to the state file, decide if they suffice, and follow what the file says."""
        async with self._drafters.changing:
            trial, taken = self.trial, self._evidence.take()
            shadow = self._shadow_sums()
            if trial is None or not (taken or shadow is not None or self._fault):
                if self._drafters.store.stamp() != self._stamp:
                    await self._follow(await asyncio.to_thread(self._drafters.store.read))
                return
            own, fault = trial.id, self._fault

            def edit(state: State) -> None:
                if state.canary is not None and state.canary.id == own:
                    _merge(state, plus(taken, shadow or {}), fault, begins=shadow is not None)

            try:
                await self._follow(await self._drafters.keep(edit))
            except StorageError:
                self._evidence.count(taken)
                raise

    def _shadow_sums(self) -> dict[str, float] | None:
        """Return what the shadow has found once it is over; None: it goes on, or there is none."""
        trial = self.trial
        if trial is None or trial.phase is not Phase.SHADOW:
            return None
        scores = self._bridge.llm.engine.shadow.scores
        self._fault = self._fault or self._failure(trial)
        names = {CANARY: trial.drafter, CONTROL: trial.control}
        known = {arm: scores[name] for arm, name in names.items() if name in scores}
        waited = self._clock() - trial.started
        if waited < SHADOW_SECONDS and (len(known) < 2 or min(score.texts for score in known.values()) < SHADOW_TEXTS):
            return None
        return {f"shadow.{arm}.{field}": value for arm, score in known.items() for field, value in score.sums().items()}

    async def _follow(self, state: State) -> None:
        """Do what the state says: drafters, default, and the canary, which another server may have ended."""
        before = self.trial
        self._stamp = self._drafters.store.stamp()
        self.past = state.past
        if before is not None and (state.canary is None or state.canary.id != before.id):
            self._announce(next((ended for ended in state.past if ended.id == before.id), before))
        await self._drafters.follow(state)
        self._adopt(state.canary)

    def _announce(self, ended: Trial) -> None:
        facts = ended.describe()
        told = {name: facts[name] for name in ("drafter", "control", "pairs", "ratio_low", "ratio_high")}
        logs.say(f"canary {ended.phase}", level=logging.WARNING, reason=ended.reason, **told)

    def _adopt(self, trial: Trial | None) -> None:
        """Take a canary over, as the state has it. Sums of this server stay if it is the same one."""
        engine = self._bridge.llm.engine
        if trial is None or self.trial is None or trial.id != self.trial.id:
            self._watch(self.trial, False)
            self._watch(trial, True)
            asked = CanaryOptions(NONE) if trial is None else trial.options
            self._evidence = Evidence(promote_at=asked.promote_at, rollback_at=asked.rollback_at)
            self._fault = None
        shadowed = () if trial is None or trial.phase is not Phase.SHADOW else (trial.drafter, trial.control)
        engine.shadow.watch([name for name in shadowed if name != NONE], texts=SHADOW_TEXTS)
        self.trial = trial
        if shadowed:
            self._bridge.wake()

    def _watch(self, trial: Trial | None, on: bool) -> None:
        """Watch the memory of a canary's drafter, and what it does wrong from now on; or no longer."""
        guard = None if trial is None else self._bridge.llm.engine.drafters.get(trial.drafter)
        if guard is not None:
            guard.memory = resident_bytes if on else None
            guard.grown, guard.fault = 0, None

    # For routes and for the start.

    async def start(self, options: CanaryOptions) -> None:
        """Begin a canary. Raises InvalidRequest if one runs already, or if its drafter cannot be used."""
        async with self._drafters.changing:
            self._refuse_second(self.trial)
            name, loaded = await self._find(options.drafter)
            plain = name == NONE or not self._bridge.llm.engine.is_hot  # a device has no shadow
            phase = Phase.RUNNING if plain else Phase.SHADOW
            trial = Trial(options, name, self._drafters.default, loaded, phase=phase, started=self._clock())

            def edit(state: State) -> None:
                self._refuse_second(state.canary)
                state.canary = trial
                if loaded:
                    state.drafters[name] = options.drafter

            try:
                await self._drafters.keep(edit)
            except PacelineError:
                if loaded:
                    await self._drafters.unload(name)
                raise
            self._adopt(trial)
            logs.say("canary started", drafter=name, control=trial.control, share=options.share, by=options.by)

    def _refuse_second(self, trial: Trial | None) -> None:
        if trial is not None and trial.open:
            raise InvalidRequest(
                f"a canary of the drafter {trial.drafter} runs already: promote it or roll it back first",
                param="drafter",
            )

    async def _find(self, words: str) -> tuple[str, bool]:
        """Return the name of a canary's drafter, and whether it was loaded for it."""
        if words == self._drafters.default:
            raise InvalidRequest(f"the drafter {words} is the default already: name another one", param="drafter")
        if words == "prediction":
            raise InvalidRequest("the drafter prediction needs predictions: it cannot be a canary", param="drafter")
        if words == NONE or self._drafters.is_loaded(words):
            return words, False
        kind = words.partition(":")[0].replace("/", "-")
        return await self._drafters.load(words, f"{kind}-canary" if self._drafters.is_loaded(kind) else None), True

    async def end(self, phase: Phase, reason: str) -> Trial:
        """Promote the canary or roll it back because the operator says so."""
        async with self._drafters.changing:
            trial = self.trial
            if trial is None:
                raise InvalidRequest("no canary runs: start one first")
            taken = self._evidence.take()

            def edit(state: State) -> None:
                if state.canary is not None and state.canary.id == trial.id:
                    state.canary.totals = plus(state.canary.totals, taken)
                    _end(state, phase, reason)

            state = await self._drafters.keep(edit)
            await self._follow(state)
            return next((ended for ended in state.past if ended.id == trial.id), trial)

    async def restore(self, asked: CanaryOptions | None) -> None:
        """Take up the state of before the restart, and begin the canary of the settings unless it was decided."""
        try:
            async with self._drafters.changing:
                await self._follow(await asyncio.to_thread(self._drafters.store.read))
        except PacelineError as error:
            logs.say("state not read", level=logging.ERROR, reason=str(error))
        if asked is None or (self.trial is not None and self.trial.options == asked):
            return
        decided = next((ended for ended in reversed(self.past) if ended.options == asked), None)
        if decided is not None:
            logs.say("canary of the settings decided before", outcome=str(decided.phase), reason=decided.reason)
            return
        try:
            await self.start(asked)
        except PacelineError as error:
            logs.say("canary of the settings not started", level=logging.ERROR, reason=str(error))

    def check_free(self, name: str) -> None:
        """Raise InvalidRequest if the canary that runs needs this drafter."""
        trial = self.trial
        if trial is not None and name in (trial.drafter, trial.control):
            raise InvalidRequest(
                f"the drafter {name} is in the canary that runs: promote it or roll it back first", param="name"
            )

    def described(self) -> dict[str, object] | None:
        """Describe the canary with the sums of this moment; None: there is none."""
        trial = self.trial
        return None if trial is None else replace(trial, totals=plus(trial.totals, self._evidence.totals)).describe()


def is_open(request: Request) -> bool:
    """Tell whether a request leaves open who drafts, and its text does not depend on that."""
    asked, sampling = request.speculation, request.sampling
    exact = asked.rule is Rule.COUPLED or (asked.rule.lossless and sampling.greedy)
    free = asked.enabled and asked.drafter is None and not request.prediction
    return exact and free and request.pooling is None and sampling.max_tokens != 0


def _unit(http: HttpRequest, trial: Trial) -> str | None:
    """Return what decides on the arm of an HTTP request; None: it lacks the header, and is in no arm."""
    if trial.options.by == "key":
        return str(http.scope.get("caller", ""))
    if trial.options.header is not None:
        return http.headers.get(trial.options.header)
    return str(http.state.request_id)


def _sums(stats: SequenceStats, arm: str) -> dict[str, float]:
    found = {"requests": 1.0, "tokens": stats.output_tokens, "drafted": stats.drafted, "accepted": stats.accepted}
    if stats.arm_speed is not None:
        speed = stats.arm_speed
        found |= {"timed": speed.tokens, "seconds": (speed.least + speed.most) / 2}
    return {f"{arm}.{name}": value for name, value in found.items()}


def _merge(state: State, more: dict[str, float], fault: str | None, *, begins: bool) -> None:
    """Add the sums of a server to those of all, and end the canary if that is decided."""
    trial = state.canary
    assert trial is not None, "the caller has looked"
    trial.totals = plus(trial.totals, more)
    if begins and trial.phase is Phase.SHADOW:
        trial.phase = Phase.RUNNING
        fault = fault or _useless(trial)
    verdict = (Phase.ROLLED_BACK, fault) if fault is not None else trial.verdict()
    if verdict is not None:
        _end(state, *verdict)


def _useless(trial: Trial) -> str | None:
    """Say why a canary gets no traffic after the shadow; None: it does."""
    drafted, accepted = (trial.totals.get(f"shadow.{CANARY}.{name}", 0.0) for name in ("drafted", "accepted"))
    if drafted >= 100 and not accepted:
        return f"none of {drafted:.0f} tokens that it drafted in the shadow was right"
    return None


def _end(state: State, phase: Phase, reason: str) -> None:
    trial = state.canary
    assert trial is not None, "the caller has looked"
    trial.phase, trial.reason = phase, reason
    if phase is Phase.PROMOTED:
        state.default = trial.drafter
    elif trial.loaded:
        state.drafters.pop(trial.drafter, None)
    state.end_canary()
