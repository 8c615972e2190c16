"""Timing of steps: plain ones and those of every drafter, at some draft lengths and numbers of sequences.

Seconds of a step depend on its rows and change little from one number to the next, so a few of each are timed, and
`tune.costs` reads what lies between them from a line. Timing every length and every power of two took a seventh of the
time of measuring all ways (docs/experiments.md).

A head reads the hidden states of a prompt in the first steps of its answer. What these take longer is a cost of its
own.

Other machines on the same host make this one slower or faster for seconds or minutes, and plain steps by another factor
than those with drafts. So steps are timed once before anything is measured, to choose what is, and again in samples
between the rounds of each measurement.

All ways with drafts make about as many steps, around the middle of the same answers: contexts grow, and a plain step
behind the last token of an answer may take a quarter longer than behind its first.

Answers of a batch end one after the other: eight code edits take 127 steps, of which 21 have eight sequences and 46
have three. So most answers that are timed end at half of the steps, and those of fewer sequences are timed with them:
on a line from one sequence to eight, steps of three would be 10-20 % too short.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.bench.workloads import BenchPrompt
from paceline.llm import LLM
from paceline.tune.candidates import is_lookup
from paceline.tune.costs import StepCosts, Table, table_of
from paceline.tune.traces import Recorded, Step, trace
from paceline.tune.ways import PLAIN, Arm, Asking

WARM_STEPS, COST_STEPS = 8, 16  # steps of each answer that warm up, and at most of those that are timed
SAMPLES = 3  # timings beside a measurement
FRESH_STEPS = 4  # steps of an answer in which a head may still read hidden states of its prompt; of others the first
MIN_COUNT = 6  # steps of each draft length from which a smaller number of sequences has a table of its own
WARM_UP, TIMED = "warm-up", "timed"  # parts of salts: nothing else finds these prompts
LADDER_FACTOR = 8  # a number of sequences whose steps are timed, by the one before
Tables = dict[int, Table]  # by the number of sequences


class Run(NamedTuple):
    """Answers of one arm that were timed."""

    arm: Arm
    batches: Sequence[Sequence[Step]]  # the steps of every batch of answers, in order
    fresh: int  # steps of each batch in which a prompt may still be read


class Timed(NamedTuple):
    """Seconds of one drafter's steps."""

    tables: Tables
    reading: float  # seconds that the first steps of an answer take longer, for each token of its prompt
    steps: int  # of each answer that were timed, at most


@dataclass(frozen=True, slots=True)
class Answers:
    """The plain answers around whose middles steps are timed, `batch` at once."""

    prompts: Sequence[BenchPrompt]
    recorded: Sequence[Recorded]
    batch: int
    asking: Asking

    @classmethod
    def middling(cls, asking: Asking, recorded: Sequence[Recorded], batch: int) -> Answers:
        """Choose prompts of middling lengths for a batch; a single sequence gets several, one after the other."""
        order = sorted(range(len(recorded)), key=lambda i: len(recorded[i].prompt))
        wanted = min(max(batch, 2), len(order))
        first = (len(order) - wanted) // 2
        chosen = [order[first + i % wanted] for i in range(max(wanted, batch))]
        chosen = chosen[: len(chosen) // batch * batch]
        return cls([asking.prompts[i] for i in chosen], [recorded[i] for i in chosen], batch, asking)

    def around(self, tokens: int) -> tuple[list[BenchPrompt], list[tuple[int, ...]]]:
        """Return prompts that end so many tokens before their answers do, half of them each, and half after."""
        made, parts = [], []
        for i, (prompt, each) in enumerate(zip(self.prompts, self.recorded, strict=True)):
            part = max(0, (len(each.answer) - tokens) // 2)
            most = min(prompt.max_tokens - part, answer_lengths(tokens, self.batch)[i % self.batch])
            made.append(replace(prompt, max_tokens=most))
            parts.append((*each.prompt, *each.answer[:part]))
        return made, parts

    def run(self, llm: LLM, arm: Arm, tokens: int, *, salt: str = TIMED) -> Run:
        """Decode the middle of each answer. Prompts are read once for each drafter that reads them itself, and once
        for all others."""
        cell = arm.cell(llm, self.batch, self.asking.temperature)
        prompts, parts = self.around(tokens)
        reads = arm.drafter != PLAIN and not is_lookup(llm, arm.drafter)
        own = f"{salt} {arm.drafter if reads else ''}"
        found: list[Sequence[Step]] = []
        for i in range(0, len(prompts), self.batch):
            some = prompts[i : i + self.batch], parts[i : i + self.batch]
            found.append(trace(llm.engine, cell, *some, ignore_eos=self.asking.ignore_eos, salt=own).steps)
        return Run(arm, found, FRESH_STEPS if reads else 1)

    def prompt_tokens(self, tokens: int) -> int:
        """Return how many tokens the prompts have in front of the middles of answers."""
        return sum(map(len, self.around(tokens)[1]))


def time_steps(
    llm: LLM, paces: Mapping[Arm, float], answers: Answers, *, seconds: float, clock: Callable[[], float]
) -> dict[str, Timed]:
    """Time steps of all arms; return what those of each drafter take.

    `paces`: tokens a step of each. `seconds`: time that all of it may take, about."""
    gc.collect()  # now, rather than during a step
    last, began = [*paces][-1], clock()
    answers.run(llm, last, _tokens(paces, WARM_STEPS)[last], salt=WARM_UP)
    most = cost_steps(len(paces) * (clock() - began), seconds)
    tokens = _tokens(paces, most)
    runs = [answers.run(llm, arm, each) for arm, each in tokens.items()]
    found = {}
    for name, tables in _tables(runs, answers.batch).items():
        first = next(run for run in runs if run.arm.drafter == name)  # later ones find prompts in the cache
        reading = reading_of(first, tables, answers.prompt_tokens(tokens[first.arm]))
        found[name] = Timed(tables, reading, most)
    return found


class Samples:
    """Steps of all arms, timed between the rounds of a measurement, and so in its minutes."""

    def __init__(
        self,
        llm: LLM,
        paces: Mapping[Arm, float],
        answers: Answers,
        *,
        rounds: int,
        steps: int,
        clock: Callable[[], float],
    ) -> None:
        """`steps`: of each answer, as they were timed at first."""
        self.seconds = 0.0  # that all samples took
        self._llm, self._answers, self._clock = llm, answers, clock
        self._tokens = [*_tokens(paces, steps).items()]
        self._round = 0  # of the measurement: those that are over
        self._due = samples_due(rounds)
        self._runs: list[Run] = []

    def tick(self) -> None:
        """Count a round of the measurement, and take the samples that are due behind it."""
        self._round += 1
        for _ in range(self._due.count(self._round)):
            began = self._clock()
            gc.collect()  # now, rather than during a step
            self._runs += [self._answers.run(self._llm, arm, tokens) for arm, tokens in self._tokens]
            self._tokens.reverse()  # what lasts for a part of a sample meets other arms in the next one
            self.seconds += self._clock() - began

    @property
    def tables(self) -> dict[str, Tables]:
        return _tables(self._runs, self._answers.batch)


def samples_due(rounds: int) -> list[int]:
    """Return the rounds behind which samples are taken: evenly over all."""
    return [min(1 + (2 * place + 1) * rounds // (2 * SAMPLES), rounds) for place in range(SAMPLES)]


def _tokens(paces: Mapping[Arm, float], steps: int) -> dict[Arm, int]:
    """Return the tokens that each arm generates in `steps` steps. Plain steps, with which all others are compared, are
    twice as many."""
    return {arm: round(steps * pace * (2 if arm.drafter == PLAIN else 1)) for arm, pace in paces.items()}


def _tables(runs: Sequence[Run], batch: int) -> dict[str, Tables]:
    """Return the seconds of each drafter's steps. Those in which a prompt may still be read count only if there are no
    others. A number of sequences has a table if all lengths of the drafter have some steps with it: a line beyond the
    rows that were timed says nothing."""
    steady: dict[str, dict[int | None, dict[int, list[Step]]]] = {}
    for arm, batches, fresh in runs:
        late = [step for steps in batches for step in steps[fresh:]] or [step for steps in batches for step in steps]
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


def answer_lengths(most: int, batch: int) -> list[int]:
    """Return the tokens of each answer of a batch: `most` for as many as lie in the middle between one and all, by
    their logarithms, and half of it for the others."""
    long = round(math.sqrt(batch))
    return [most] * long + [most // 2] * (batch - long)


def reading_of(run: Run, tables: Tables, prompt_tokens: int) -> float:
    """Return how many seconds the first steps after new prompts took longer than usual ones, for each token of the
    prompts."""
    if run.arm.drafter == PLAIN:
        return 0.0
    usual = StepCosts(tables).seconds
    first = [step for steps in run.batches for step in steps[: run.fresh]]
    longer = sum(step.seconds - usual(step.sequences, step.rows) for step in first)
    return max(0.0, longer) / prompt_tokens


def cost_steps(warm: float, seconds: float) -> int:
    """Return the steps of answers that are timed, if WARM_STEPS of all, and prompts, took `warm` seconds."""
    fit = math.inf if not warm else WARM_STEPS * seconds / ((1 + SAMPLES) * warm)
    return int(min(max(fit, WARM_STEPS), COST_STEPS))


def ladder(most: int) -> list[int]:
    """Numbers of sequences whose steps are timed: powers of LADDER_FACTOR up to `most`, and `most` itself."""
    found = [1]
    while found[-1] * LADDER_FACTOR < most:
        found.append(found[-1] * LADDER_FACTOR)
    return sorted({*found, most})


def timed_lengths(lengths: Sequence[int], batch: int) -> list[int]:
    """Draft lengths whose steps are timed: the shortest and the longest, and for a batch the middle one. Its rows cost
    more each, the more there are."""
    middle = [lengths[len(lengths) // 2]] if batch > 1 else []
    return sorted({lengths[0], *middle, lengths[-1]})
