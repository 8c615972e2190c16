"""A load on a server, and what came of it: arms in turns, block by block, under every load and temperature.

    block 1          block 2          block 3
    on   off         off  on          on   off         each arm gets the same asks; who begins changes

Arms never run at the same time, so they do not slow each other down, and a block is short, so a slow phase of the
machine meets all of them. With one arm everything is one block. A server that goes away ends the run; what came before
is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.arrivals import Arrivals, Load, times
from paceline.bench.client import Client, Outcome, body
from paceline.bench.counters import Counters
from paceline.bench.workloads import Ask
from paceline.errors import InvalidRequest

BLOCKS = 10  # of a comparison at most
INVOCATION = time.time_ns()  # of this program: a server may remember what an earlier one asked
GONE = 3  # connections refused in a row after which a server counts as gone
Tick = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask: of one server, with fields of its own."""

    name: str
    client: Client
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Block:
    """Some asks under one arm."""

    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    not_sent: int = 0


@dataclass(slots=True)
class Run:
    """One arm under one load at one temperature."""

    arm: Arm
    load: Load
    temperature: float
    blocks: list[Block] = field(default_factory=list)
    counters: Counters | None = None

    @property
    def outcomes(self) -> list[Outcome]:
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
class Plan:
    """What to ask, and how hard."""

    asks: Sequence[Ask]
    loads: Sequence[Load] = (Load(at_once=1),)
    temperatures: Sequence[float] = (0.0,)
    arrivals: Arrivals = "poisson"
    rounds: int = 1  # how often all of it
    warm_up: int = 1  # requests to each arm that do not count
    seed: int = 0
    salt: bool = True  # no run finds in a prefix cache what another has computed


class Gone(Exception):
    """The server cannot be reached any more."""


async def measure(plan: Plan, arms: Sequence[Arm], runs: list[Run], *, tick: Callable[[Run], Tick]) -> None:
    """Fills `runs`, which keeps what there is if this is interrupted. `tick` is told of every outcome of a run."""
    for arm in arms:
        for ask in plan.asks:
            body(ask, arm.client.kind, {})  # what cannot be asked is said before anything is
        await _warm_up(plan, arm)
    try:
        for load in plan.loads:
            for temperature in plan.temperatures:
                mine = [Run(arm, load, temperature) for arm in arms]
                runs += mine
                await _in_turns(plan, mine, tick)
    except Gone:
        return


async def _warm_up(plan: Plan, arm: Arm) -> None:
    """Also the place where a request that no server of this kind takes is found out."""
    for i in range(plan.warm_up):
        ask = plan.asks[i % len(plan.asks)]
        outcome = await arm.client.ask(ask, _fields(plan, arm, plan.temperatures[0], run="warm-up"))
        if not outcome.good:
            raise InvalidRequest(f"{arm.name}: a first request to {arm.client.root} failed: {outcome.error}")


async def _in_turns(plan: Plan, runs: Sequence[Run], tick: Callable[[Run], Tick]) -> None:
    ticks = [tick(run) for run in runs]
    for number, asks in enumerate(blocks(plan, runs[0].load, arms=len(runs))):
        order = list(zip(runs, ticks, strict=True))
        for run, told in order if number % 2 == 0 else reversed(order):
            await _block(plan, run, asks, number=number, arms=len(runs), tick=told)


def blocks(plan: Plan, load: Load, *, arms: int) -> Iterator[Sequence[Ask]]:
    count, many = len(plan.asks), many_blocks(plan, load, arms=arms)
    for _ in range(plan.rounds):
        for i in range(many):
            yield plan.asks[i * count // many : (i + 1) * count // many]


def many_blocks(plan: Plan, load: Load, *, arms: int) -> int:
    """Of a round. Each has two asks or more for each that may be open, so that it is mostly at its full load."""
    return 1 if arms == 1 else max(1, min(BLOCKS, len(plan.asks) // (2 * (load.at_once or 8))))


async def _block(plan: Plan, run: Run, asks: Sequence[Ask], *, number: int, arms: int, tick: Tick) -> None:
    before = await run.arm.client.counters()
    block = Block()
    run.blocks.append(block)  # at once: an interrupted block keeps what it has
    turn = f"{run.arm.name}/{run.load.title}/{run.temperature:g}/{number // many_blocks(plan, run.load, arms=arms)}"
    fields = _fields(plan, run.arm, run.temperature, run=turn)
    due = times(run.load, count=len(asks), arrivals=plan.arrivals, seed=plan.seed + number)
    began = time.perf_counter()
    try:
        await _send(run, block, list(zip(due, asks, strict=True)), fields, began, tick)
    finally:
        block.seconds = time.perf_counter() - began
    after = await run.arm.client.counters()
    if before is not None and after is not None:
        run.counters = (run.counters or Counters()) + (after - before)
    if block.not_sent:
        raise Gone


async def _send(
    run: Run, block: Block, due: Sequence[tuple[float, Ask]], fields: Mapping[str, Any], began: float, tick: Tick
) -> None:
    """All asks of a block, each when it is due and there is room for it."""
    room = asyncio.Semaphore(run.load.at_once or len(due))
    refused = 0

    async def one(ask: Ask) -> None:
        nonlocal refused
        try:
            outcome = await run.arm.client.ask(ask, fields)
        finally:
            room.release()
        refused = refused + 1 if outcome.unreachable else 0
        block.outcomes.append(outcome)
        tick(outcome)

    async with asyncio.TaskGroup() as group:
        for sent, (when, ask) in enumerate(due):
            await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
            await room.acquire()
            if refused >= GONE:
                block.not_sent = len(due) - sent
                return
            group.create_task(one(ask))


def _fields(plan: Plan, arm: Arm, temperature: float, *, run: str) -> dict[str, Any]:
    """What every request of a run has; `run` names it. Prompts that begin alike still share that within a run."""
    salt = {"cache_salt": f"{INVOCATION}/{run}"} if plan.salt else {}
    return {"model": arm.model, "temperature": temperature, **salt, **arm.fields}
