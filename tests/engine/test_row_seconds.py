"""The cost of rows in small passes: a staircase is told from a slope, and a busy machine from a dear row."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.engine.cost import MAX_ROW_PRICE, PRICED_TOKENS, CostModel
from paceline.engine.row_seconds import MAX_ROWS, RowSeconds

STAIRS = [0.0, 2.7, 2.9, 3.2, 3.6, 4.8, 5.4, 6.0, 6.7]  # ms of a pass by rows, where kernels take rows by four


def learnt(passes: dict[int, float], rounds: int = 40) -> RowSeconds:
    times = RowSeconds()
    for _ in range(rounds):
        for rows, seconds in passes.items():
            times.add(rows, seconds)
    return times


def test_every_number_of_rows_has_its_own_seconds() -> None:
    times = learnt({rows: STAIRS[rows] for rows in range(1, 9)})
    assert [times.seconds(rows) for rows in range(1, 9)] == pytest.approx(STAIRS[1:])


def test_passes_that_were_never_run_lie_between_their_neighbours() -> None:
    times = learnt({2: 3.0, 4: 3.2, 8: 6.4})
    assert [times.seconds(rows) for rows in (3, 6)] == pytest.approx([3.1, 4.8], rel=0.01)
    assert times.seconds(1) == pytest.approx(2.9, rel=0.01)
    assert times.seconds(9) == pytest.approx(
        7.2, rel=0.01
    )  # the line goes on, but never faster than in proportion to the rows
    assert learnt({1: 1.0, 2: 2.9}, rounds=400).seconds(4) == pytest.approx(5.8, rel=0.02)
    assert times.seconds(2 * MAX_ROWS) == pytest.approx(51.2, rel=0.05)


def test_one_number_of_rows_tells_nothing_of_another() -> None:
    times = RowSeconds()
    assert not times.knows
    times.add(3, 5.0)
    times.add(MAX_ROWS + 1, 50.0)
    assert not times.knows
    times.add(4, 5.0)
    assert times.knows


def test_a_slower_machine_makes_all_rows_slower_not_those_that_run_now() -> None:
    """Rows 1 to 8 were measured; then the machine takes twice as long, and only passes over 2 and 3 rows run."""
    times = learnt({rows: STAIRS[rows] for rows in range(1, 9)})
    for _ in range(20):
        times.add(2, 2 * STAIRS[2])
        times.add(3, 2 * STAIRS[3])
    assert times.seconds(2) == pytest.approx(2 * STAIRS[2], rel=0.02)
    assert times.seconds(5) / times.seconds(2) == pytest.approx(STAIRS[5] / STAIRS[2], rel=0.2)


def test_noise_leaves_the_step_where_it_is() -> None:
    """Each time varies by a tenth, one in fifty passes takes three times as long, and long passes are rare."""
    rng, times = random.Random(3), RowSeconds()
    for _ in range(600):
        rows = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6])
        times.add(rows, STAIRS[rows] * rng.lognormvariate(0, 0.1) * (3 if rng.random() < 0.02 else 1))
    steps = [more - less for less, more in pairwise([times.seconds(rows) for rows in range(1, 7)])]
    assert max(steps) == steps[3]  # from four rows to five


def prices_of(machine: list[float], *, sequences: int = 1, tokens: int = 2) -> tuple[float, ...]:
    cost = CostModel()
    assert cost.row_prices(sequences) == ()
    for _ in range(800):
        for rows in range(sequences, len(machine)):
            seconds = machine[rows]
            cost.observe(sequences=sequences, rows=rows, tokens=tokens, pass_seconds=seconds, step_seconds=4.0)
    return cost.row_prices(sequences)


def test_a_row_has_the_price_of_its_step() -> None:
    prices = prices_of(STAIRS)
    assert len(prices) == PRICED_TOKENS
    assert prices[:4] == pytest.approx([0.5 * step for step in (0.2, 0.3, 0.4, 1.2)], rel=0.05)  # 2 tokens in 4 ms


def test_sequences_that_draft_together_share_the_price_of_their_rows() -> None:
    """Two sequences of one token more each: from 2 rows to 4, from 4 to 6, and 2 tokens in 4 ms."""
    prices = prices_of(STAIRS, sequences=2)
    assert prices[:3] == pytest.approx([0.25 * step for step in (0.7, 1.8, 1.3)], rel=0.05)


def test_a_single_slow_pass_does_not_make_a_row_dear() -> None:
    cost = CostModel()
    for step in range(60):
        rows = 1 + step % 4
        cost.observe(sequences=1, rows=rows, tokens=2, pass_seconds=2.7 + 0.1 * rows, step_seconds=4.0)
    cost.observe(sequences=1, rows=5, tokens=2, pass_seconds=30.0, step_seconds=31.0)
    assert cost.row_prices(1)[3] < 0.2


def test_no_row_is_so_dear_that_it_is_never_measured_again() -> None:
    assert max(prices_of([0.0, 1.0, 1.0, 9.0, 9.0])) == MAX_ROW_PRICE
    assert min(prices_of([0.0, 2.0, 1.9, 1.8, 1.7])) == 0.0


def test_of_passes_that_were_made_to_be_timed_a_quick_one_counts_but_not_the_quickest_of_four() -> None:
    times = RowSeconds()
    for rows, seconds in ((1, 2.0), (2, 9.0), (2, 3.0), (2, 3.5)):
        times.time(rows, seconds)
    assert times.knows
    assert [times.seconds(rows) for rows in (1, 2)] == [2.0, 3.0]
    times.time(2, 1.0)
    assert times.seconds(2) == 3.0


def test_other_work_beside_some_passes_changes_no_ratio() -> None:
    """Each number of rows has one quiet moment in three, but not the same; the other moments take up to thrice."""
    quiet, rng, times = {1: 2.0, 2: 2.2, 4: 2.4, 8: 2.8, 16: 4.6}, random.Random(5), RowSeconds()
    for turn in range(3):
        for i, rows in enumerate(quiet):
            slow, beside = (1.0 if turn == i % 3 else rng.uniform(1.2, 3.0) for _ in range(2))
            times.time(rows, slow * quiet[rows], beside=beside * quiet[1])
    assert {rows: times.seconds(rows) for rows in quiet} == pytest.approx(quiet)


def test_a_slow_moment_makes_few_rows_no_dearer_than_many() -> None:
    times = RowSeconds()
    for rows, seconds in ((1, 2.0), (3, 5.0), (4, 2.2), (8, 2.4)):
        times.time(rows, seconds, beside=2.0)
    assert [times.seconds(rows) for rows in (1, 3, 4, 8)] == pytest.approx([2.0, 2.2, 2.2, 2.4])


def test_many_rows_take_no_longer_than_in_proportion_to_few() -> None:
    times = RowSeconds()
    for rows, seconds in ((1, 2.0), (4, 2.4), (8, 9.0), (16, 9.0)):
        times.time(rows, seconds, beside=2.0)
    assert [times.seconds(rows) for rows in (1, 4, 8, 16)] == pytest.approx([2.0, 2.4, 4.8, 9.0])


def test_passes_in_traffic_hardly_move_ratios_that_were_timed() -> None:
    """The machine is a third slower when traffic begins, and first with passes over 8 rows alone."""
    times = RowSeconds()
    for _ in range(3):
        for rows, seconds in ((1, 2.0), (8, 3.2)):
            times.time(rows, seconds)
    for rows in (8, 8, 8, 1, 1, 1):
        times.add(rows, 1.3 * {1: 2.0, 8: 3.2}[rows])
    assert times.seconds(8) / times.seconds(1) == pytest.approx(1.6, rel=0.03)
