"""Timing of steps: plain ones and those of every drafter, at some draft lengths and numbers of sequences.

Seconds of a step depend on its rows and change little from one number to the next, so a few of each are timed, and
`tune.costs` reads what lies between them from a line. Timing every length and every power of two took a seventh of the
time of measuring all ways (docs/experiments.md).

A head reads the hidden states of a prompt in the first steps of its answer. What these take longer is a cost of its
own.

Other machines on the same host make this one slower or faster for seconds or minutes, and plain steps by another factor
than those with drafts. So steps are timed once before anything is measured, to choose what is, and again in samples
between the rounds of each measurement.

Answers of a batch end one after the other: eight code edits take 127 steps, of which 16 have eight sequences and 46
have three. So most answers that are timed end at half of the length, and steps of fewer sequences are timed with them:
on a line from one sequence to eight, steps of three would be 10-20 % too short.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.bench.workloads import BenchPrompt
from paceline.llm import LLM
from paceline.tune.costs import StepCosts, Table, table_of
from paceline.tune.traces import Step, trace
from paceline.tune.ways import PLAIN, Arm, Asking

WARM_TOKENS, COST_TOKENS = 8, 32  # tokens of answers that warm up, and at most of those whose steps are timed at first
SAMPLES = (1.25,) * 3  # tokens of the answers of each sample beside a measurement, by those timed at first
FRESH_STEPS = 4  # steps of an answer in which a head may still read hidden states of its prompt
MIN_COUNT = 6  # steps of each draft length from which a smaller number of sequences has a table of its own
WARM_UP, TIMED = -2, -3  # numbers of rounds, which are parts of their salts: no other round finds these prompts
LADDER_FACTOR = 8  # a number of sequences whose steps are timed, by the one before
Tables = dict[int, Table]  # by the number of sequences
Runs = Sequence[tuple[Arm, Sequence[Sequence[Step]]]]  # of each arm: the steps of every batch of answers, in order


class Timed(NamedTuple):
    """Seconds of one drafter's steps."""

    tables: Tables
    reading: float  # seconds that the first steps of an answer take longer, for each token of its prompt
    tokens: int  # tokens of answers whose steps were timed, at most


def time_steps(
    llm: LLM, arms: Sequence[Arm], asking: Asking, batch: int, *, seconds: float, clock: Callable[[], float]
) -> dict[str, Timed]:
    """Time steps of all arms, `batch` sequences at once; return what those of each drafter take.

    `seconds`: time that all of it may take, about."""
    prompts, tokens = _middle(asking, batch)
    chosen = _Prompts(prompts, tokens, batch, asking)
    began = clock()
    chosen.steps(llm, arms[-1], WARM_TOKENS, salt=WARM_UP)
    most = cost_tokens(len(arms) * (clock() - began), seconds)
    runs = [(arm, chosen.steps(llm, arm, most)) for arm in arms]
    read = sum(map(len, tokens))
    return {
        name: Timed(tables, reading_of(name, tables, runs, read), most) for name, tables in _tables(runs, batch).items()
    }


class Samples:
    """Steps of all arms, timed between the rounds of a measurement, and so in its minutes."""

    def __init__(
        self,
        llm: LLM,
        arms: Sequence[Arm],
        asking: Asking,
        batch: int,
        *,
        rounds: int,
        tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`tokens`: of answers whose steps were timed at first."""
        self.seconds = 0.0  # that all samples took
        self._llm, self._arms, self._batch, self._clock = llm, list(arms), batch, clock
        self._chosen = _Prompts(*_middle(asking, batch), batch, asking)
        self._round = 0  # of the measurement: those that are over
        self._due = samples_due(rounds, tokens)
        self._runs: list[tuple[Arm, Sequence[Sequence[Step]]]] = []

    def tick(self) -> None:
        """Count a round of the measurement, and take the samples that are due behind it."""
        self._round += 1
        for most in self._due.get(self._round, ()):
            began = self._clock()
            self._runs += [(arm, self._chosen.steps(self._llm, arm, most)) for arm in self._arms]
            self._arms.reverse()  # what lasts for a part of a sample meets other arms in the next one
            self.seconds += self._clock() - began

    @property
    def tables(self) -> dict[str, Tables]:
        return _tables(self._runs, self._batch)


def samples_due(rounds: int, tokens: int) -> dict[int, list[int]]:
    """Return the tokens of the samples by the round behind which they are taken: evenly over all rounds."""
    due: dict[int, list[int]] = {}
    for place, share in enumerate(SAMPLES):
        behind = 1 + (2 * place + 1) * rounds // (2 * len(SAMPLES))
        due.setdefault(min(behind, rounds), []).append(max(int(share * tokens), WARM_TOKENS))
    return due


def _tables(runs: Runs, batch: int) -> dict[str, Tables]:
    """Return the seconds of each drafter's steps. Those in which a prompt may still be read count only if there are no
    others. A number of sequences has a table if all lengths of the drafter have some steps with it: a line beyond the
    rows that were timed says nothing."""
    steady: dict[str, dict[int | None, dict[int, list[Step]]]] = {}
    for arm, each in runs:
        late = [step for steps in each for step in steps[FRESH_STEPS:]] or [step for steps in each for step in steps]
        by = steady.setdefault(arm.drafter, {}).setdefault(arm.draft, {})
        for step in whole(late, arm.draft):
            by.setdefault(step.sequences, []).append(step)
    return {
        name: {
            count: table_of(step for by in lengths.values() for step in by.get(count, ()))
            for count in _counts(list(lengths.values()), batch)
        }
        for name, lengths in steady.items()
    }


def _counts(lengths: Sequence[dict[int, list[Step]]], batch: int) -> list[int]:
    """Return the numbers of sequences that have a table, given the steps of each draft length by their number."""
    every = {count for by in lengths for count in by}
    enough = [count for count in every if all(len(by.get(count, ())) >= MIN_COUNT for by in lengths)]
    return sorted({*enough, *(every & {batch})}) or sorted(every)


def whole(steps: Sequence[Step], draft: int | None) -> Sequence[Step]:
    """Count drafts that the end of an answer cut as whole, if most have all `draft` tokens: a head takes as many passes
    for the others, and its step as long."""
    full = [step.rows == step.sequences * (1 + (draft or 0)) for step in steps]
    if not draft or 2 * sum(full) <= len(full):
        return steps
    return [step._replace(rows=step.sequences * (1 + draft)) for step in steps]


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts whose answers are timed, `batch` at once."""

    prompts: Sequence[BenchPrompt]
    tokens: Sequence[tuple[int, ...]]
    batch: int
    asking: Asking

    def steps(self, llm: LLM, arm: Arm, most: int, *, salt: int = TIMED) -> list[Sequence[Step]]:
        """Decode at most so many tokens of each answer. Prompts with the same `salt` are in the prefix cache."""
        gc.collect()  # now, rather than during a step
        cell = arm.cell(llm, self.batch, self.asking.temperature)
        limits = answer_lengths(most, self.batch)
        found: list[Sequence[Step]] = []
        for i in range(0, len(self.prompts), self.batch):
            prompts = self.prompts[i : i + self.batch]
            short = [replace(p, max_tokens=min(p.max_tokens, limit)) for p, limit in zip(prompts, limits, strict=True)]
            tokens = self.tokens[i : i + self.batch]
            found.append(trace(llm.engine, cell, short, tokens, number=salt, ignore_eos=self.asking.ignore_eos).steps)
        return found


def answer_lengths(most: int, batch: int) -> list[int]:
    """Return the tokens of each answer of a batch: `most` for as many as lie in the middle between one and all, by
    their logarithms, and half of it for the others."""
    long = round(math.sqrt(batch))
    return [most] * long + [most // 2] * (batch - long)


def reading_of(name: str, tables: Tables, runs: Runs, prompt_tokens: int) -> float:
    """Return how many seconds the first steps after new prompts took longer than usual ones, for each token of a
    prompt."""
    if name == PLAIN:
        return 0.0
    usual = StepCosts(tables).seconds
    mine = [each for arm, each in runs if arm.drafter == name]
    first = [step for each in mine for steps in each for step in steps[:FRESH_STEPS]]
    longer = sum(step.seconds - usual(step.sequences, step.rows) for step in first)
    return max(0.0, longer) / (len(mine) * prompt_tokens)


def cost_tokens(warm: float, seconds: float) -> int:
    """Return the tokens of answers whose steps are timed, if WARM_TOKENS of all, and prompts, took `warm` seconds."""
    fit = math.inf if not warm else WARM_TOKENS * seconds / ((1 + sum(SAMPLES)) * warm)
    return int(min(max(fit, WARM_TOKENS), COST_TOKENS))


def _middle(asking: Asking, batch: int) -> tuple[list[BenchPrompt], list[tuple[int, ...]]]:
    """Choose prompts of middling lengths for a batch; a single sequence gets several, one after the other."""
    order = sorted(range(len(asking.tokens)), key=lambda i: len(asking.tokens[i]))
    wanted = min(max(batch, 2), len(order))
    first = (len(order) - wanted) // 2
    chosen = [order[first + i % wanted] for i in range(max(wanted, batch))]
    chosen = chosen[: len(chosen) // batch * batch]
    return [asking.prompts[i] for i in chosen], [asking.tokens[i] for i in chosen]


def ladder(most: int) -> list[int]:
    """Numbers of sequences whose steps are timed: powers of LADDER_FACTOR up to `most`, and `most` itself."""
    found = [1]
    while found[-1] * LADDER_FACTOR < most:
        found.append(found[-1] * LADDER_FACTOR)
    return sorted({*found, most})


def timed_lengths(lengths: Sequence[int]) -> list[int]:
    """Draft lengths whose steps are timed: the shortest and the longest."""
    return sorted({lengths[0], lengths[-1]})
