"""Plain and speculative decoding of the same prompts on one engine, in turns: the grid, and what every turn came to.

A *cell* is one way to speculate (drafter, longest draft) at one batch size and temperature; plain decoding is the empty
one. Every batch of prompts is decoded by all cells in turn, forwards and backwards by round, so that a slow phase of
the machine meets all of them. Seconds are those in which every request of the batch has its first token: reading
prompts is the same for all cells, and not what is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.audit.replay import Replay
from paceline.bench.workloads import Ask
from paceline.engine.engine import Engine
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation

PARTS = ("plan", "draft", "verify", "accept", "emit", "wait")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to decode. `title` names it among those of the same batch size and temperature."""

    batch: int
    temperature: float
    speculation: Speculation = OFF
    name: str = "plain"

    @property
    def plain(self) -> bool:
        return not self.speculation.enabled

    @property
    def title(self) -> str:
        limit = self.speculation.max_draft
        return self.name if limit is None else f"{self.name} ≤{limit}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of prompts decoded once."""

    tokens: int  # after every request had its first
    seconds: float
    steps: int
    parts: dict[str, float]  # seconds
    answers: list[Replay]


@dataclass(frozen=True, slots=True)
class Unit:
    """One batch of prompts, and its turns by every cell."""

    asks: Sequence[Ask]
    turns: dict[Cell, list[Turn]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grid:
    """`drafters`: by name; None is the engine's choice. `drafts`: the longest; None is the engine's choice, too."""

    drafters: Sequence[str | None] = (None,)
    drafts: Sequence[int | None] = (None,)
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    rule: Rule = Rule.COUPLED
    rounds: int = 3
    ignore_eos: bool = False

    def cells(self, batch: int, temperature: float) -> list[Cell]:
        """Plain comes first."""
        ways = [
            (drafter or "default", Speculation(drafter=drafter, max_draft=draft, rule=self.rule))
            for drafter in self.drafters
            for draft in self.drafts
        ]
        return [Cell(batch, temperature), *(Cell(batch, temperature, how, name) for name, how in ways)]


def measure(
    engine: Engine,
    asks: Sequence[Ask],
    prompts: Sequence[tuple[int, ...]],
    grid: Grid,
    *,
    tick: Callable[[Cell, int, int], None] = lambda cell, done, total: None,
) -> Iterator[tuple[list[Cell], list[Unit]]]:
    """`prompts`: the tokens of each ask. For every batch size and temperature its cells, and the units they decoded."""
    for batch in grid.batches:
        for temperature in grid.temperatures:
            cells = grid.cells(batch, temperature)
            units = [Unit(asks[i : i + batch]) for i in range(0, len(asks), batch)]
            for cell in cells:
                _turn(engine, cell, units[0], prompts[:batch], grid, number=-1)  # to get warm
            for number, unit in enumerate(units):
                _rounds(engine, cells, unit, prompts[number * batch : (number + 1) * batch], grid)
                tick(cells[0], number + 1, len(units))
            yield cells, units


def _rounds(engine: Engine, cells: Sequence[Cell], unit: Unit, prompts: Sequence[tuple[int, ...]], grid: Grid) -> None:
    gc.collect()  # now, rather than in the middle
    for number in range(grid.rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            turn = _turn(engine, cell, unit, prompts, grid, number=number)
            unit.turns.setdefault(cell, []).append(turn)


def _turn(
    engine: Engine, cell: Cell, unit: Unit, prompts: Sequence[tuple[int, ...]], grid: Grid, *, number: int
) -> Turn:
    params = SamplingParams(temperature=cell.temperature, ignore_eos=grid.ignore_eos)
    requests = [
        Request(
            id=f"{number}/{i}",
            prompt=prompt,
            sampling=replace(params, max_tokens=ask.max_tokens, seed=ask.seed),
            speculation=cell.speculation,
        )
        for i, (ask, prompt) in enumerate(zip(unit.asks, prompts, strict=True))
    ]
    return decode(engine, requests)


def decode(engine: Engine, requests: Sequence[Request]) -> Turn:
    """All requests together, from the moment at which each has its first token."""
    answers = {request.id: Replay() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work and not all(answer.tokens or answer.finish for answer in answers.values()):
        _hear(engine, answers)
    began, before, early = time.perf_counter(), replace(engine.stats), _tokens(answers)
    ended, after = began, before
    while engine.has_work:
        if _hear(engine, answers):  # the last step on a device may be one that nobody waits for
            ended, after = time.perf_counter(), replace(engine.stats)
    return Turn(
        tokens=_tokens(answers) - early,
        seconds=ended - began,
        steps=after.steps - before.steps,
        parts={part: _spent(before, after, part) for part in PARTS},
        answers=list(answers.values()),
    )


def _hear(engine: Engine, answers: dict[str, Replay]) -> bool:
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
