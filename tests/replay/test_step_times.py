"""Times of simulated steps: tables are interpolated, lines are fitted, outliers do not count."""

from __future__ import annotations

import random

import pytest

from paceline.replay.step_times import PassShape, PassTable, StepTimes, fitted, interpolated

TABLE = PassTable({1: 1.0, 3: 2.0, 5: 8.0}, {1: 0.5, 5: 1.5}, read_token=0.01, attended_token=0.001)
TIMES = StepTimes(TABLE, {1: 2.0, 3: 4.0}, {1: 3.0}, (0.5, 5.0), (1.0, 0.1, 0.01), (1.0, 0.5, 0.25, 0.125))


def test_a_table_is_interpolated_and_goes_on() -> None:
    assert [interpolated(TABLE.body, rows) for rows in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 5.0, 8.0, 14.0]
    assert interpolated({2: 3.0}, 9) == 3.0
    assert interpolated({1: 5.0, 2: 4.0}, 9) == 4.0  # never faster for more rows than were measured


def test_a_pass_pays_for_rows_logits_and_context() -> None:
    assert TABLE.seconds(PassShape(rows=3, outs=1, read=100, attended=300)) == pytest.approx(2.0 + 0.5 + 1.0 + 0.3)
    assert TABLE.seconds(PassShape(rows=3, outs=0, read=0, attended=0)) == pytest.approx(2.0)


def test_a_pass_inside_a_step_has_the_scale_of_such_steps() -> None:
    alone = TABLE.seconds(PassShape(1, 1, 0, 0))
    assert TIMES.pass_seconds(PassShape(1, 1, 0, 0)) == pytest.approx(2 * alone)
    assert TIMES.pass_seconds(PassShape(1, 1, 0, 0, drafted=True)) == pytest.approx(3 * alone)
    assert TIMES.pass_seconds(PassShape(1, 1, 0, 0, drawing=2)) == pytest.approx(3 * alone)
    assert TIMES.pass_seconds(PassShape(3, 1, 0, 0)) == pytest.approx(0.5 + 5 * 2.5)  # rows of a prompt
    assert TIMES.host_seconds(sequences=2, prompt_rows=10) == pytest.approx(1.3)
    assert TIMES.draft_seconds(asks=2, passes=4, fresh=8) == pytest.approx(4.0)


def test_all_times_are_scaled() -> None:
    twice = TIMES.scaled(2.0)
    for shape in (PassShape(1, 1, 0, 0), PassShape(1, 1, 0, 0, drafted=True), PassShape(3, 1, 0, 0)):
        assert twice.pass_seconds(shape) == pytest.approx(2 * TIMES.pass_seconds(shape))
    assert twice.host_seconds(sequences=1, prompt_rows=1) == pytest.approx(2.22)
    assert twice.draft_seconds(asks=1, passes=1, fresh=1) == pytest.approx(3.75)


def test_lines_are_fitted_without_outliers_and_below_no_zero() -> None:
    rng = random.Random(0)
    features = [(1.0, rng.randrange(1, 9), rng.randrange(100)) for _ in range(200)]
    seconds = [1.0 + 0.5 * x + 0.01 * y for _, x, y in features]
    assert fitted(features, seconds) == pytest.approx((1.0, 0.5, 0.01))
    assert fitted(features, [*seconds[:-4], 90.0, 95.0, 80.0, 99.0]) == pytest.approx((1.0, 0.5, 0.01), rel=1e-6)
    falling = fitted([(1.0, x) for x in range(1, 9)], [10.0 - x for x in range(1, 9)])
    assert falling[1] == 0
    assert falling[0] == pytest.approx(5.5)
