"""Costs of steps by rows, and speeds that are predicted from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.tune.costs import StepCosts, read, stored, table_of
from paceline.tune.predictions import plain_rounds, predict, units
from paceline.tune.traces import Round, Step


class Known(StepCosts):
    """Costs by a function of sequences and rows."""

    def __init__(self, step: Callable[[int, float], float], reading: float = 0.0) -> None:
        super().__init__({1: {1: 1.0}}, {1: reading})
        self._step = step

    def seconds(self, sequences: int, rows: float) -> float:
        return self._step(sequences, rows)


def steps(rows: int, *seconds: float) -> list[Step]:
    return [Step(1, rows, each) for each in seconds]


def test_means_by_rows_without_outliers() -> None:
    table = table_of([*steps(1, 1.0, 1.0, 1.0, 1.2, 90.0), *steps(4, *[2.0] * 5)])
    assert table == {1: pytest.approx((1 + 1 + 1 + 1.2 + 3.0) / 5), 4: 2.0}
    assert read(stored(table)) == table


def test_few_steps_of_neighbouring_rows_count_together() -> None:
    few = [*steps(2, 1.0, 1.0), *steps(4, 2.0, 2.0, 2.0)]
    assert table_of([*few, *steps(4, 5.0)]) == {3: pytest.approx(13 / 6)}


def test_a_few_steps_of_many_more_rows_count() -> None:
    few = steps(4, *[2.0] * 5)
    assert table_of([*few, *steps(5, 9.0)]) == {4: 2.0}  # left out
    assert table_of([*few, *steps(6, 3.0), *steps(12, 5.0)]) == {4: 2.0, 9: 4.0}
    assert table_of(steps(7, 3.0)) == {7: 3.0}
    assert table_of([]) == {}


def test_seconds_between_measured_steps() -> None:
    costs = StepCosts({1: {1: 1.0, 5: 3.0}, 4: {4: 2.0, 20: 6.0}})
    assert costs.seconds(1, 1) == 1.0
    assert costs.seconds(1, 3) == pytest.approx(2.0)
    assert costs.seconds(4, 12) == pytest.approx(4.0)
    assert costs.seconds(2, 2) == pytest.approx(1 + (2.0 - 1.0) / 3)  # a third of the way from 1 to 4 sequences
    assert costs.seconds(2, 10) == pytest.approx(3 + (6.0 - 3.0) / 3)
    assert costs.seconds(8, 8) == 2.0  # beyond all measured numbers as the largest one


def test_a_batch_steps_together_and_answers_leave() -> None:
    rounds = [[Round(1, 2), Round(3, 2), Round(2, 0)], [Round(2, 1)]]
    asked: list[tuple[int, float]] = []

    def seconds(sequences: int, rows: float) -> float:
        asked.append((sequences, rows))
        return float(rows)

    [unit] = units(rounds, (20, 30), batch=2, costs=Known(seconds))
    assert asked == [(2, 5), (1, 3), (1, 1)]
    assert (unit.tokens, unit.seconds) == (8, 9.0)
    assert sorted(unit.tpots) == [9.0 / 6, 5.0 / 2]
    assert [u.tokens for u in units(rounds, (20, 30), batch=1, costs=Known(seconds))] == [6, 2]
    [unit] = units(rounds, (20, 30), batch=2, costs=Known(seconds, reading=0.1))
    assert unit.seconds == pytest.approx(9.0 + 0.1 * (20 + 30)), "the drafter reads prompts, too"


def test_a_prediction() -> None:
    rounds = [[Round(2, 2), Round(1, 2)]] * 4
    made = predict("x", 2, 1, rounds, [9] * 4, mine=Known(lambda s, r: 1.5), plain=Known(lambda s, r: 1.0))
    assert made is not None
    assert (made.tok_s, made.ratio, made.interval) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx((1, 1)))
    assert (made.tokens_per_step, made.acceptance, made.tpot) == (1.5, 0.25, 1.0)
    assert made.record()["draft"] == 2
    both = {"mine": Known(lambda s, r: 2.0), "plain": Known(lambda s, r: 1.0)}
    silent = predict("x", 2, 1, plain_rounds([3, 3]), [9, 9], **both)
    assert silent is not None
    assert (silent.ratio, silent.acceptance, silent.interval) == (0.5, None, None)
    assert predict("x", 2, 1, plain_rounds([1, 1]), [9, 9], **both) is None


def test_reading_between_measured_numbers_of_sequences() -> None:
    costs = StepCosts({1: {1: 1.0}}, {1: 0.1, 5: 0.3})
    assert [costs.reading(n) for n in (1, 3, 5, 9)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert StepCosts({1: {1: 1.0}}).reading(1) == 0.0
