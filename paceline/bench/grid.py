"""The grid of `bench offline --grid`: kinds of prompts × batch sizes × temperatures, each a place with several arms.

An *arm* is one way to decode: plain, the default settings, or a fixed drafter and draft length. All arms of a place
decode the same batch of prompts in turn, once a round, and every second round in reverse order. Places come in an order
that is useful when it is cut: each kind once, at batch sizes and temperatures that differ from kind to kind, then each
once more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.audit.degeneration import degeneration
from paceline.bench.offline import Cell, Turn, take_turn
from paceline.bench.workloads import BenchPrompt
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest
from paceline.types import Finish, Rule, Speculation

Record = dict[str, Any]
PLAIN, DEFAULT = "plain", "default"


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one kind, and what they are always asked with."""

    name: str
    source: str  # of `paceline.bench.workloads`
    temperature: float | None = None  # None: each temperature of the grid
    max_tokens: int | None = None  # None: that of the grid


SET_KINDS = tuple(
    Kind(name, name)
    for name in ("spec_bench", "mt_bench", "humaneval", "gsm8k", "code_edit", "bfcl", "jsonschemabench")
)
HARD_KINDS = (  # kinds that defeat drafters
    Kind("random", "random"),
    Kind("scripts", "scripts"),
    Kind("hot", "mt_bench", temperature=1.5),
    Kind("base64", "base64"),
    Kind("short", "short", max_tokens=8),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One cell of the grid."""

    kind: Kind
    batch: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.kind.name}, batch {self.batch}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts of one kind with their tokens."""

    prompts: Sequence[BenchPrompt]
    tokens: Sequence[tuple[int, ...]]

    def batch(self, number: int, size: int) -> tuple[list[BenchPrompt], list[tuple[int, ...]]]:
        """Return the prompts of a round, each with a seed of its own. They begin again where they end."""
        places = range(number * size, (number + 1) * size)
        prompts = [replace(self.prompts[i % len(self.prompts)], seed=i) for i in places]
        return prompts, [self.tokens[i % len(self.tokens)] for i in places]

    def longest(self, number: int, size: int) -> int:
        """Return the tokens of a round's prompts and longest answers."""
        prompts, tokens = self.batch(max(number, 0), size)
        return sum(prompt.max_tokens + len(each) for prompt, each in zip(prompts, tokens, strict=True))

    def turn_through(self, number: int, size: int) -> int:
        """Return how often all prompts were asked before a round: part of its salt, since a drafter that remembers
        answers must not find one to the same prompt."""
        return (number * size + size - 1) // len(self.prompts)


def arms(drafters: Sequence[str], drafts: Sequence[int], place: Place, *, rule: Rule = Rule.COUPLED) -> list[Cell]:
    """The arms of a place: plain, the default, and each drafter with drafts of each fixed length."""
    batch, temperature = place.batch, place.temperature
    fixed = [
        Cell(batch, temperature, Speculation(drafter=drafter, max_draft=draft, rule=rule), drafter, fixed=True)
        for drafter in drafters
        for draft in drafts
    ]
    return [Cell(batch, temperature), Cell(batch, temperature, Speculation(rule=rule), DEFAULT), *fixed]


def in_order(kinds: Sequence[Kind], batches: Sequence[int], temperatures: Sequence[float]) -> list[Place]:
    """All places, a coarse cover of the whole grid first."""
    by_kind = []
    for kind in kinds:
        own = temperatures if kind.temperature is None else (kind.temperature,)
        by_kind.append([Place(kind, batch, own[i % len(own)]) for i, batch in _pairs(_outside_in(batches), len(own))])
    longest = max(map(len, by_kind), default=0)
    return [
        places[(turn + offset) % len(places)]
        for turn in range(longest)
        for offset, places in enumerate(by_kind)
        if turn < len(places)
    ]


def _pairs(batches: Sequence[int], temperatures: int) -> Iterator[tuple[int, int]]:
    """Yield each batch size with each index of a temperature; neighbours differ in both."""
    for turn in range(temperatures):
        for i, batch in enumerate(batches):
            yield i + turn, batch


def _outside_in(values: Sequence[int]) -> list[int]:
    """Sort values so that the first few span their range: smallest, largest, then those between."""
    left = sorted(values)
    found: list[int] = []
    while left:
        found.append(left.pop(0 if len(found) % 2 == 0 else -1))
    return found


def measure_place(
    engine: Engine,
    place: Place,
    cells: Sequence[Cell],
    asked: Asked,
    *,
    rounds: int,
    ignore_eos: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> Record:
    """Decode `rounds` batches with all arms, and return what they took. `tick` is called after each round.

    The memory that all of it needs is touched before: of a new virtual machine the first write to 2 MiB takes up to
    5 ms, and plain steps of eight sequences took 11 % longer."""
    began = time.monotonic()
    engine.probes.touch(len(cells) * sum(asked.longest(number, place.batch) for number in range(-1, rounds)))
    for cell in cells:
        take_turn(engine, cell, *asked.batch(0, place.batch), number=-1, ignore_eos=ignore_eos)
    turns: dict[Cell, list[Turn]] = {cell: [] for cell in cells}
    for number in range(rounds):
        gc.collect()  # now, rather than during a turn
        batch, salt = asked.batch(number, place.batch), asked.turn_through(number, place.batch)
        for cell in cells if number % 2 == 0 else reversed(cells):
            turns[cell].append(take_turn(engine, cell, *batch, number=salt, ignore_eos=ignore_eos))
        tick()
    return {
        "kind": place.kind.name,
        "batch": place.batch,
        "temperature": place.temperature,
        "arms": {cell.title: _arm(turns[cell]) for cell in cells},
        "answers": rounds * place.batch,
        "identical": _identical(turns[cells[0]], turns[cells[1]]),
        "degenerate": sum(_degenerate(turn) for turn in turns[cells[0]]),
        "seconds": round(time.monotonic() - began, 1),
    }


def _arm(turns: Sequence[Turn]) -> Record:
    stats = [answer.stats for turn in turns for answer in turn.answers]
    steps, drafted = sum(s.steps for s in stats), sum(s.drafted for s in stats)
    return {
        "tokens": [turn.tokens for turn in turns],
        "seconds": [turn.seconds for turn in turns],
        "tokens_per_step": sum(s.output_tokens for s in stats) / steps if steps else 0.0,
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "ttft": [s.time_to_first for s in stats],
        "tpot": [(s.time_total - s.time_to_first) / (s.output_tokens - 1) for s in stats if s.output_tokens > 1],
    }


def _identical(plain: Sequence[Turn], default: Sequence[Turn]) -> int:
    pairs = [pair for a, b in zip(plain, default, strict=True) for pair in zip(a.answers, b.answers, strict=True)]
    return sum(a.tokens == b.tokens for a, b in pairs)


def _degenerate(turn: Turn) -> int:
    ended = [a.finish is Finish.STOP and isinstance(a.stop, int) for a in turn.answers]
    return sum(degeneration(a.tokens, stopped=e) is not None for a, e in zip(turn.answers, ended, strict=True))


@dataclass(slots=True)
class Budget:
    """Time for new places."""

    minutes: float | None  # None: as long as it takes
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def spent(self) -> bool:
        return self.minutes is not None and self.clock() - self.began >= 60 * self.minutes


def run_places(
    places: Sequence[Place],
    known: Mapping[str, Record],
    *,
    budget: Budget,
    measure: Callable[[Place], Record],
    keep: Callable[[Record], None],
) -> tuple[dict[str, Record], list[tuple[Place, str]], bool]:
    """Measure all places that are not `known`, within the budget; `keep` gets each as it is complete.

    Returns records by place, the places left out with the reasons, and whether the user stopped it."""
    found, skipped, stopped = dict(known), [], False
    for place in places:
        if place.name in found:
            continue
        if stopped or budget.spent:
            why = "interrupted" if stopped else f"the {budget.minutes:g} minutes were over"
            skipped.append((place, why))
            continue
        try:
            found[place.name] = record = measure(place)
            keep(record)
        except InvalidRequest as error:  # prompts that cannot be read, or that do not fit the context
            skipped.append((place, str(error)))
        except KeyboardInterrupt:
            stopped = True
            skipped.append((place, "interrupted"))
    return found, skipped, stopped
