from __future__ import annotations

import math

import pytest
import torch

from paceline.audit.chi_squared import p_value, pool, smallest_shift, statistic


@pytest.mark.parametrize(("value", "freedom", "p"), [(3.841, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001)])
def test_the_tables_of_the_books(value: float, freedom: int, p: float) -> None:
    assert p_value(value, freedom) == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize(
    ("effect", "freedom", "samples"),  # Cohen 1988, tables 7.4: samples for a power of 0.9 at 0.05
    [(0.1, 1, 1051), (0.3, 1, 117), (0.3, 4, 171), (0.5, 10, 82)],
)
def test_power_is_that_of_the_books(effect: float, freedom: int, samples: int) -> None:
    assert 2 * smallest_shift(samples, freedom, alarm=0.05, power=0.9) == pytest.approx(effect, rel=0.01)


def test_what_a_shift_of_the_stated_size_does() -> None:
    """Simulated: such a shift is found about as often as stated, and no alarm is false more often than that."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    samples, alarm = 2000, 0.01
    shift = smallest_shift(samples, 2, alarm=alarm, power=0.9)
    moved = p + torch.tensor([shift, -0.6 * shift, -0.4 * shift], dtype=torch.float64)

    def share_of_alarms(drawn_from: torch.Tensor) -> float:
        draws = torch.multinomial(drawn_from.expand(500, -1), samples, replacement=True, generator=generator)
        counts = torch.stack([torch.bincount(row, minlength=3) for row in draws]).double()
        return sum(p_value(statistic(row, p * samples), 2) < alarm for row in counts) / 500

    assert share_of_alarms(p) < 0.03
    assert share_of_alarms(moved) > 0.86


def test_rare_cells_are_thrown_together() -> None:
    counts, expected = pool(torch.tensor([50.0, 3.0, 1.0]), torch.tensor([48.0, 4.0, 2.0]))
    assert counts.tolist() == [50, 4]
    assert expected.tolist() == [48, 6]


def test_what_cannot_be_is_never_by_chance() -> None:
    found = statistic(torch.tensor([5.0, 1.0]), torch.tensor([6.0, 0.0]))
    assert math.isinf(found)
    assert p_value(found, 3) == 0
