"""Predictions: the speed of a drafter with drafts of a fixed length, at any batch size.

The rounds of answers are put together as an engine would run them: all answers of a batch step together, and one that
has ended leaves. Each step takes what such a step was measured to take. Prompts are not predicted: they take the same
time whatever drafts. What a drafter reads of them itself is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.statistics import Ratio, paired_ratio
from paceline.tune.costs import StepCosts
from paceline.tune.traces import Round, Rounds


@dataclass(frozen=True, slots=True)
class Unit:
    """A predicted batch of answers."""

    tokens: int
    seconds: float
    tpots: tuple[float, ...]  # seconds a token, of each answer


@dataclass(frozen=True, slots=True)
class Prediction:
    """The speed of one way to decode, before it is measured."""

    drafter: str  # as the user named it
    draft: int  # tokens of each draft
    batch: int
    tok_s: float
    ratio: float  # to plain decoding
    interval: tuple[float, float] | None
    tokens_per_step: float
    acceptance: float | None  # accepted tokens a drafted one; None: nothing was drafted
    tpot: float  # seconds a token of an answer, median

    def record(self) -> dict[str, Any]:
        return asdict(self)


def plain_rounds(answers: Sequence[int]) -> list[list[Round]]:
    """Return the rounds of plain answers with so many tokens."""
    return [[Round(1, 0)] * (tokens - 1) for tokens in answers]


def units(rounds: Sequence[Rounds], prompts: Sequence[int], *, batch: int, costs: StepCosts) -> list[Unit]:
    """Predict batches of answers, in their order. The last one may be smaller. `prompts`: tokens of each."""
    starts = range(0, len(rounds), batch)
    return [_unit(rounds[i : i + batch], sum(prompts[i : i + batch]), costs) for i in starts]


def _unit(rounds: Sequence[Rounds], prompts: int, costs: StepCosts) -> Unit:
    longest, spent, tpots = max(map(len, rounds)), prompts * costs.reading(len(rounds)), []
    for number in range(longest):
        now = [each[number] for each in rounds if number < len(each)]
        spent += costs.seconds(len(now), sum(1 + each.drafted for each in now))
        tpots += [spent / sum(r.tokens for r in each) for each in rounds if len(each) == number + 1]
    return Unit(sum(r.tokens for each in rounds for r in each), spent, tuple(tpots))


def predict(
    drafter: str,
    draft: int,
    batch: int,
    rounds: Sequence[Rounds],
    prompts: Sequence[int],
    *,
    mine: StepCosts,
    plain: StepCosts,
) -> Prediction | None:
    """Predict a drafter beside plain decoding of the same answers; None: no answer has a second token. `prompts`:
    tokens of each answer's prompt."""
    tokens = [1 + sum(r.tokens for r in each) for each in rounds]
    speculative = units(rounds, prompts, batch=batch, costs=mine)
    beside = units(plain_rounds(tokens), prompts, batch=batch, costs=plain)
    ratio = paired_ratio(*([(unit.tokens, unit.seconds) for unit in arm] for arm in (speculative, beside)))
    if ratio is None:
        return None
    every = [r for each in rounds for r in each]
    drafted = sum(r.drafted for r in every)
    accepted = sum(r.tokens - 1 for r in every)
    return Prediction(
        drafter=drafter,
        draft=draft,
        batch=batch,
        tok_s=sum(unit.tokens for unit in speculative) / sum(unit.seconds for unit in speculative),
        ratio=ratio.value,
        interval=_interval(ratio),
        tokens_per_step=sum(r.tokens for r in every) / len(every),
        acceptance=accepted / drafted if drafted else None,
        tpot=statistics.median(tpot for unit in speculative for tpot in unit.tpots),
    )


def _interval(ratio: Ratio) -> tuple[float, float] | None:
    return None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
