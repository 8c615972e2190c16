"""Timing of steps: plain ones and those of every drafter, at some draft lengths and numbers of sequences.

Seconds of a step depend on its rows and change little from one number to the next, so a few of each are timed, and
`tune.costs` reads what lies between them from a line. Timing every length and every power of two took a seventh of the
time of measuring all ways (docs/experiments.md).

A head reads the hidden states of a prompt in the first steps of its answer. Answers are short here, so those steps are
timed apart: in the first turn prompts are new, in the others the prefix cache has them, and the head has read them.

Other machines on the same host make this one slower or faster for minutes, and plain steps by another factor than those
with drafts. So steps are timed once before anything is measured, to choose what is, and again behind each measurement.

Where answers are timed together, every second one is shorter, so that steps of half as many sequences are timed, too:
a line between one sequence and eight is 10 to 20 % too low in the middle.
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

WARM_TOKENS, COST_TOKENS = 8, 40  # tokens of answers after new prompts, and at most of those whose steps are timed
SHORT_SHARE = 5 / 8  # tokens of every second answer, by those of the others
MIN_HALVED = 4  # sequences from which steps of half as many are timed, too
WARM_UP, TIMED = -2, -3  # numbers of rounds, which are parts of their salts: no other round finds these prompts
LADDER_FACTOR = 8  # a number of sequences whose steps are timed, by the one before


class Timed(NamedTuple):
    """Seconds of one drafter's steps."""

    tables: dict[int, Table]  # by the number of sequences
    reading: float  # seconds that the first steps of an answer take longer, for each token of its prompt
    tokens: int  # tokens of answers whose steps were timed, at most


def time_steps(
    llm: LLM, arms: Sequence[Arm], asking: Asking, batch: int, *, seconds: float, clock: Callable[[], float]
) -> dict[str, Timed]:
    """Time steps of all arms in turns, `batch` sequences at once; return what those of each drafter take.

    `seconds`: time that all of it may take, about."""
    prompts, tokens = _middle(asking, batch)
    chosen = _Prompts(prompts, tokens, batch, asking)
    chosen.steps(llm, arms[-1], WARM_TOKENS, salt=WARM_UP)
    began = clock()
    fresh = [(arm, chosen.steps(llm, arm, WARM_TOKENS)) for arm in arms]
    most = cost_tokens(clock() - began, seconds)
    tables, read = _tables(chosen, llm, arms, most), sum(map(len, tokens))
    return {name: Timed(found, reading_of(name, found, fresh, read), most) for name, found in tables.items()}


def time_again(
    llm: LLM, arms: Sequence[Arm], asking: Asking, batch: int, *, tokens: int
) -> dict[str, dict[int, Table]]:
    """Time the same steps again, behind prompts that have been read; `tokens`: of each answer, as at first."""
    chosen = _Prompts(*_middle(asking, batch), batch, asking)
    for arm in {arm.drafter: arm for arm in arms}.values():
        chosen.steps(llm, arm, WARM_TOKENS)  # prompts may have left the cache
    return _tables(chosen, llm, arms, tokens)


def _tables(chosen: _Prompts, llm: LLM, arms: Sequence[Arm], most: int) -> dict[str, dict[int, Table]]:
    """Return the seconds of each drafter's steps by the number of sequences, from answers of at most so many tokens."""
    steady: dict[str, dict[int, list[Step]]] = {}
    gc.collect()  # now, rather than during a step
    for arm in arms:
        for step in whole(chosen.steps(llm, arm, most, apart=True), arm.draft):
            steady.setdefault(arm.drafter, {}).setdefault(step.sequences, []).append(step)
    return {name: {size: table_of(found) for size, found in sizes.items()} for name, sizes in steady.items()}


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

    def steps(self, llm: LLM, arm: Arm, most: int, *, salt: int = TIMED, apart: bool = False) -> list[Step]:
        """Decode at most so many tokens of each answer, if `apart` fewer of every second one. Prompts with the same
        `salt` are in the prefix cache."""
        cell = arm.cell(llm, self.batch, self.asking.temperature)
        sizes = {self.batch, self.batch // 2} if apart and self.batch >= MIN_HALVED else {self.batch}
        limits = (most, math.ceil(SHORT_SHARE * most)) if len(sizes) > 1 else (most, most)
        lengths = [min(prompt.max_tokens, limits[i % 2]) for i, prompt in enumerate(self.prompts)]
        short = [replace(prompt, max_tokens=length) for prompt, length in zip(self.prompts, lengths, strict=True)]
        found: list[Step] = []
        for i in range(0, len(short), self.batch):
            some = short[i : i + self.batch], self.tokens[i : i + self.batch]
            found += trace(llm.engine, cell, *some, number=salt, ignore_eos=self.asking.ignore_eos).steps
        return [step for step in found if step.sequences in sizes]


def reading_of(
    name: str, tables: dict[int, Table], fresh: Sequence[tuple[Arm, Sequence[Step]]], prompt_tokens: int
) -> float:
    """Return how many seconds the steps after new prompts took longer than usual ones, for each token of a prompt."""
    if name == PLAIN:
        return 0.0
    usual = StepCosts(tables).seconds
    mine = [steps for arm, steps in fresh if arm.drafter == name]
    longer = sum(step.seconds - usual(step.sequences, step.rows) for steps in mine for step in steps)
    return max(0.0, longer) / (len(mine) * prompt_tokens)


def cost_tokens(warm: float, seconds: float) -> int:
    """Return the tokens of answers whose steps are timed, if WARM_TOKENS of all, and prompts, took `warm` seconds."""
    fit = math.inf if not warm else WARM_TOKENS * seconds / (2 * warm)  # once at first, once behind a measurement
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
    """Draft lengths whose steps are timed behind a measurement: the shortest, the middle and the longest."""
    return sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
