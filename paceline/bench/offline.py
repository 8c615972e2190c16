"""Plain and speculative decoding of the same prompts on one engine, in turns: the grid of cells, and their timings.

A *cell* is one way to decode (plain, or a drafter with a longest draft) at one batch size and temperature. All cells
decode every batch of prompts in turn, and every second round in reverse order, so that a slow phase of the machine
affects all of them. Each cell has a salt of its own in every round: a drafter that remembers answers finds those of
earlier prompts, and never its own of an earlier round. Seconds count from the moment at which every request of the
batch has its first token: prefill is the same for all cells, and is not measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.audit.replay import Replay
from paceline.bench.workloads import BenchPrompt
from paceline.engine.engine import Engine
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation

PARTS = ("plan", "draft", "verify", "accept", "emit", "wait")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to decode. Its title is unique among cells of the same batch size and temperature."""

    batch: int
    temperature: float
    speculation: Speculation = OFF
    name: str = "plain"
    fixed: bool = False  # every draft has the longest length, whatever the governor thinks of it

    @property
    def plain(self) -> bool:
        return not self.speculation.enabled

    @property
    def title(self) -> str:
        limit = self.speculation.max_draft
        return self.name if limit is None else f"{self.name} {'=' if self.fixed else '≤'}{limit}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of prompts decoded once."""

    tokens: int  # tokens decoded after every request had its first
    seconds: float
    steps: int
    parts: dict[str, float]  # seconds by part of a step
    answers: list[Replay]


@dataclass(frozen=True, slots=True)
class Unit:
    """One batch of prompts, and its turns by cell, one per round."""

    prompts: Sequence[BenchPrompt]
    turns: dict[Cell, list[Turn]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells to measure: every combination of these values."""

    drafters: Sequence[str | None] = (None,)  # None: the engine's choice
    drafts: Sequence[int | None] = (None,)  # tokens of the longest draft; None: the engine's choice
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    rule: Rule = Rule.COUPLED
    rounds: int = 3
    ignore_eos: bool = False

    def cells(self, batch: int, temperature: float) -> list[Cell]:
        """Cells of one batch size and temperature, the plain one first."""
        ways = [
            (drafter or "default", Speculation(drafter=drafter, max_draft=draft, rule=self.rule))
            for drafter in self.drafters
            for draft in self.drafts
        ]
        return [Cell(batch, temperature), *(Cell(batch, temperature, how, name) for name, how in ways)]


def measure(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    tokens: Sequence[tuple[int, ...]],
    grid: Grid,
    *,
    tick: Callable[[Cell, int, int], None] = lambda cell, done, total: None,
) -> Iterator[tuple[list[Cell], list[Unit]]]:
    """Yield, for every batch size and temperature, the cells and the units that they decoded. `tokens`: token ids of
    each prompt. `tick` is called with a cell, the number of finished batches and the number of all."""
    for batch in grid.batches:
        for temperature in grid.temperatures:
            cells = grid.cells(batch, temperature)
            units = [Unit(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
            for cell in cells:
                take_turn(engine, cell, units[0].prompts, tokens[:batch], number=-1, ignore_eos=grid.ignore_eos)
            for number, unit in enumerate(units):
                _rounds(engine, cells, unit, tokens[number * batch : (number + 1) * batch], grid)
                tick(cells[0], number + 1, len(units))
            yield cells, units


def _rounds(engine: Engine, cells: Sequence[Cell], unit: Unit, tokens: Sequence[tuple[int, ...]], grid: Grid) -> None:
    gc.collect()  # now, rather than during a turn
    for number in range(grid.rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            turn = take_turn(engine, cell, unit.prompts, tokens, number=number, ignore_eos=grid.ignore_eos)
            unit.turns.setdefault(cell, []).append(turn)


def take_turn(
    engine: Engine,
    cell: Cell,
    prompts: Sequence[BenchPrompt],
    tokens: Sequence[tuple[int, ...]],
    *,
    number: int,
    ignore_eos: bool = False,
) -> Turn:
    """Decode a batch of prompts once. `number`: of the round, part of the salt; -1 for a warm-up.

    Plain decoding and fixed drafts teach the governor nothing: the cells that it governs go as they would alone."""
    requests = requests_of(cell, prompts, tokens, number=number, ignore_eos=ignore_eos)
    with engine.fixed_drafts() if cell.fixed or cell.plain else nullcontext():
        return decode(engine, requests)


def requests_of(
    cell: Cell,
    prompts: Sequence[BenchPrompt],
    tokens: Sequence[tuple[int, ...]],
    *,
    number: int,
    ignore_eos: bool = False,
    salt: str | None = None,
) -> list[Request]:
    """Make the requests of a turn. `salt` None: those of the same cell and round share one."""
    params = SamplingParams(temperature=cell.temperature, ignore_eos=ignore_eos)
    own = f"{cell.title}, {cell.batch} at once, temperature {cell.temperature}, round {number}"
    return [
        Request(
            id=f"{number}/{i}",
            prompt=encoded,
            sampling=replace(params, max_tokens=prompt.max_tokens, seed=prompt.seed),
            speculation=cell.speculation,
            cache_salt=own if salt is None else salt,
        )
        for i, (prompt, encoded) in enumerate(zip(prompts, tokens, strict=True))
    ]


def decode(engine: Engine, requests: Sequence[Request]) -> Turn:
    """Decode all requests together, timed from the moment at which each has its first token."""
    answers = {request.id: Replay() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work and not all(answer.tokens or answer.finish for answer in answers.values()):
        _step(engine, answers)
    began, before, early = time.perf_counter(), replace(engine.stats), _tokens(answers)
    ended, after = began, before
    while engine.has_work:
        if _step(engine, answers):  # a device may run a last step without events
            ended, after = time.perf_counter(), replace(engine.stats)
    return Turn(
        tokens=_tokens(answers) - early,
        seconds=ended - began,
        steps=after.steps - before.steps,
        parts={part: _spent(before, after, part) for part in PARTS},
        answers=list(answers.values()),
    )


def _step(engine: Engine, answers: dict[str, Replay]) -> bool:
    """Run a step and collect its events; return whether there were any."""
    events = engine.step()
    for event in events:
        answers[event.request_id].add(event)
    if engine.dead is not None:
        raise EngineDead(f"the engine stopped in the middle of the measurement ({engine.dead})")
    return bool(events)


def _tokens(answers: dict[str, Replay]) -> int:
    return sum(len(answer.tokens) for answer in answers.values())


def _spent(before: EngineStats, after: EngineStats, part: str) -> float:
    def of(stats: Any) -> float:
        return float(getattr(stats, f"time_{part}"))

    return of(after) - of(before)
