"""Timing of steps: plain ones and those of every drafter, at some draft lengths and numbers of sequences.

Seconds of a step depend on its rows and change little from one number to the next, so a few of each are timed, and
`tune.costs` reads what lies between them from a line. Timing every length and every power of two took a seventh of the
time of measuring all ways (docs/experiments.md).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.bench.workloads import BenchPrompt
from paceline.llm import LLM
from paceline.tune.costs import Table, table_of
from paceline.tune.traces import Step, trace
from paceline.tune.ways import Arm, Asking

WARM_TOKENS, COST_TOKENS = 8, 32  # tokens of answers that warm up, and at most of those whose steps are timed
COST_TURNS = 2  # timed turns of each arm, every second one in reverse order
LADDER_FACTOR = 4  # a number of sequences whose steps are timed, by the one before


def time_steps(
    llm: LLM, arms: Sequence[Arm], asking: Asking, batch: int, *, seconds: float, clock: Callable[[], float]
) -> dict[str, Table]:
    """Time steps of all arms in turns, `batch` sequences at once; return a table for each drafter.

    `seconds`: time that all of it may take, about."""
    steps: dict[str, list[Step]] = {}
    prompts, tokens = _middle(asking, batch)
    began, most = clock(), WARM_TOKENS
    for turn in range(1 + COST_TURNS):
        gc.collect()  # now, rather than during a step
        short = [replace(prompt, max_tokens=min(prompt.max_tokens, most)) for prompt in prompts]
        for arm in arms if turn % 2 == 0 else reversed(arms):
            cell = arm.cell(llm, batch, asking.temperature)
            for i in range(0, len(short), batch):
                some = short[i : i + batch], tokens[i : i + batch]
                made = trace(llm.engine, cell, *some, number=-2 - turn, ignore_eos=asking.ignore_eos)
                if turn:
                    steps.setdefault(arm.drafter, []).extend(s for s in made.steps if s.sequences == batch)
        most = most if turn else cost_tokens(clock() - began, seconds)
    return {name: table_of(found) for name, found in steps.items() if found}


def cost_tokens(warm: float, seconds: float) -> int:
    """Return the tokens of answers whose steps are timed, if WARM_TOKENS of all took `warm` seconds."""
    fit = math.inf if not warm else WARM_TOKENS * seconds / (COST_TURNS * warm)
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
    """Draft lengths whose steps are timed: the shortest, the middle and the longest."""
    return sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
