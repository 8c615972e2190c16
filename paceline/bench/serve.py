"""A load on a server: arms in turns, block by block, under every load and temperature.

    block 1          block 2          block 3
    on   off         off  on          on   off         each arm gets the same prompts; the order alternates

Arms never run at the same time, so they do not slow each other down. Blocks are short, so a slow phase of the machine
affects all arms. A single arm has a single block. A server that goes away ends the measurement; earlier results are
kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.bench.arrivals import Arrivals, Load, times
from paceline.bench.client import Client, RequestOutcome, body
from paceline.bench.counters import SpecCounters
from paceline.bench.workloads import BenchPrompt, synthetic_prompts
from paceline.errors import InvalidRequest

MAX_BLOCKS = 10  # blocks per round of a comparison
MAX_REFUSED = 3  # connections refused in a row; then the server counts as gone
INVOCATION = time.time_ns()  # part of the cache salt: a server may still cache prompts of an earlier invocation
PROBE_WORDS = (40, 160)  # lengths in words of the two prompts that measure tokens per word
Tick = Callable[[RequestOutcome], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to send the prompts: to one server, with its own fields of the request."""

    name: str
    client: Client
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Block:
    """Consecutive prompts sent by one arm."""

    seconds: float = 0.0
    outcomes: list[RequestOutcome] = field(default_factory=list)
    not_sent: int = 0


@dataclass(slots=True)
class LoadRun:
    """One arm under one load at one temperature."""

    arm: Arm
    load: Load
    temperature: float
    blocks: list[Block] = field(default_factory=list)
    counters: SpecCounters | None = None

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for block in self.blocks for outcome in block.outcomes]

    @property
    def seconds(self) -> float:
        return sum(block.seconds for block in self.blocks)

    @property
    def not_sent(self) -> int:
        return sum(block.not_sent for block in self.blocks)

    @property
    def complete(self) -> bool:
        return bool(self.blocks) and not self.not_sent and all(outcome.good for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The prompts to send, and the loads and temperatures to send them under."""

    prompts: Sequence[BenchPrompt]
    loads: Sequence[Load] = (Load(at_once=1),)
    temperatures: Sequence[float] = (0.0,)
    arrivals: Arrivals = "poisson"
    rounds: int = 1  # repetitions of all prompts
    warm_up: int = 1  # uncounted requests to each arm
    seed: int = 0
    salt: bool = True  # a cache salt keeps runs from sharing the server's prefix cache

    @property
    def requests(self) -> int:
        """Number of counted requests of one arm."""
        return len(self.prompts) * self.rounds * len(self.loads) * len(self.temperatures)


class ServerGone(Exception):
    """The server cannot be reached any more."""


async def measure(plan: LoadPlan, arms: Sequence[Arm], runs: list[LoadRun], *, tick: Callable[[LoadRun], Tick]) -> None:
    """Measure all loads and temperatures into `runs`, which keeps what there is if this is interrupted. `tick` returns
    the function that is called with every outcome of a run."""
    for arm in arms:
        for prompt in plan.prompts:
            body(prompt, arm.client.endpoint, {})  # raises for an unsuitable prompt before anything is sent
        await _warm_up(plan, arm)
    try:
        for load in plan.loads:
            for temperature in plan.temperatures:
                mine = [LoadRun(arm, load, temperature) for arm in arms]
                runs += mine
                await _in_turns(plan, mine, tick)
    except ServerGone:
        return


async def _warm_up(plan: LoadPlan, arm: Arm) -> None:
    """Send uncounted requests, and raise if the server refuses one."""
    for i in range(plan.warm_up):
        prompt = plan.prompts[i % len(plan.prompts)]
        outcome = await arm.client.send(prompt, _fields(plan, arm, plan.temperatures[0], run="warm-up"))
        if not outcome.good:
            raise InvalidRequest(f"{arm.name}: a first request to {arm.client.root} failed: {outcome.error}")


async def _in_turns(plan: LoadPlan, runs: Sequence[LoadRun], tick: Callable[[LoadRun], Tick]) -> None:
    ticks = [tick(run) for run in runs]
    for number, prompts in enumerate(blocks(plan, runs[0].load, arms=len(runs))):
        order = list(zip(runs, ticks, strict=True))
        for run, told in order if number % 2 == 0 else reversed(order):
            await _block(plan, run, prompts, number=number, arms=len(runs), tick=told)


def blocks(plan: LoadPlan, load: Load, *, arms: int) -> Iterator[Sequence[BenchPrompt]]:
    """Yield the prompts of each block, round after round."""
    count, many = len(plan.prompts), blocks_per_round(plan, load, arms=arms)
    for _ in range(plan.rounds):
        for i in range(many):
            yield plan.prompts[i * count // many : (i + 1) * count // many]


def blocks_per_round(plan: LoadPlan, load: Load, *, arms: int) -> int:
    """Choose blocks of at least two prompts for each request that may be open, to run mostly at full load."""
    return 1 if arms == 1 else max(1, min(MAX_BLOCKS, len(plan.prompts) // (2 * (load.at_once or 8))))


async def _block(
    plan: LoadPlan, run: LoadRun, prompts: Sequence[BenchPrompt], *, number: int, arms: int, tick: Tick
) -> None:
    before = await run.arm.client.counters()
    block = Block()
    run.blocks.append(block)  # before it runs: an interrupted block keeps what it has
    turn = number // blocks_per_round(plan, run.load, arms=arms)
    name = f"{run.arm.name}/{run.load.title}/{run.temperature:g}/{turn}"
    fields = _fields(plan, run.arm, run.temperature, run=name)
    due = times(run.load, count=len(prompts), arrivals=plan.arrivals, seed=plan.seed + number)
    began = time.perf_counter()
    try:
        await send_all(run, block, list(zip(due, prompts, strict=True)), fields, began, tick)
    finally:
        block.seconds = time.perf_counter() - began
    after = await run.arm.client.counters()
    if before is not None and after is not None:
        run.counters = (run.counters or SpecCounters()) + (after - before)
    if block.not_sent:
        raise ServerGone


async def send_all(
    run: LoadRun,
    block: Block,
    due: Sequence[tuple[float, BenchPrompt]],
    fields: Mapping[str, Any],
    began: float,
    tick: Tick,
) -> None:
    """Send all prompts of a block, each when it is due and fewer than `at_once` requests are open."""
    room = asyncio.Semaphore(run.load.at_once or len(due))
    refused = 0

    async def one(prompt: BenchPrompt) -> None:
        nonlocal refused
        try:
            outcome = await run.arm.client.send(prompt, fields)
        finally:
            room.release()
        refused = refused + 1 if outcome.unreachable else 0
        block.outcomes.append(outcome)
        tick(outcome)

    async with asyncio.TaskGroup() as group:
        for sent, (when, prompt) in enumerate(due):
            await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
            await room.acquire()
            if refused >= MAX_REFUSED:
                block.not_sent = len(due) - sent
                return
            group.create_task(one(prompt))


def _fields(plan: LoadPlan, arm: Arm, temperature: float, *, run: str) -> dict[str, Any]:
    """Fields of every request of a run, whose name goes into the cache salt. Prompts of one run may still share a
    prefix. `top_p` is sent, because a server's own default would otherwise cut what the temperature allows."""
    salt = {"cache_salt": f"{INVOCATION}/{run}"} if plan.salt else {}
    return {"model": arm.model, "temperature": temperature, "top_p": 1.0, **salt, **arm.fields}


async def words_for(arm: Arm, kind: str, *, tokens: int, data: Path | None) -> int:
    """Words of a synthetic prompt that the server will count as about `tokens`, those of the chat template included.
    The server's counts of two prompts give tokens per word."""
    counts = [await _prompt_tokens(arm, kind, words=words, data=data) for words in PROBE_WORDS]
    per_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    if per_word <= 0:
        return tokens  # a server that does not count: one token per word
    return max(1, round(PROBE_WORDS[0] + (tokens - counts[0]) / per_word))


async def _prompt_tokens(arm: Arm, kind: str, *, words: int, data: Path | None) -> int:
    """Tokens that the server counts in a synthetic prompt."""
    [prompt] = synthetic_prompts(kind, count=1, words=words, data=data, seed=-1)
    outcome = await arm.client.send(replace(prompt, max_tokens=1), {"model": arm.model, "temperature": 0})
    if outcome.error is not None and not outcome.counted:
        raise InvalidRequest(f"a first request to {arm.client.root} failed: {outcome.error}")
    return outcome.prompt_tokens
