"""Overlap of steps: worth it while few sequences wait, or while the host takes long beside the device."""

from __future__ import annotations

import pytest

from paceline.engine.overlap import Overlap


def after(step: float, host: float) -> Overlap:
    overlap = Overlap()
    for i in range(40):
        overlap.landed(10.0 * i, step)
        overlap.launched(10.0 * i + host)
    return overlap


def test_without_waiting_sequences_it_always_pays() -> None:
    assert Overlap().pays(0)
    assert after(1.0, 1e-9).pays(0)


def test_half_of_the_sequences_until_times_are_known() -> None:
    assert Overlap().pays(0.5)
    assert not Overlap().pays(0.51)


@pytest.mark.parametrize(("step", "host", "most"), [(4.0, 0.5, 2 / 9), (0.8, 0.5, 10 / 13), (1.0, 2.0, 1.0)])
def test_it_pays_while_less_is_lost_than_the_host_s_time(step: float, host: float, most: float) -> None:
    overlap = after(step, host)
    assert overlap.pays(most - 0.01)
    assert overlap.pays(most + 0.01) is (most == 1.0)


def test_idle_time_is_not_the_host_s() -> None:
    overlap = after(4.0, 0.5)
    overlap.landed(1000.0, 4.0)
    overlap.idle()
    overlap.launched(9000.0)
    assert not overlap.pays(0.25)


def test_a_step_of_unknown_time_changes_nothing() -> None:
    overlap = after(4.0, 0.5)
    overlap.landed(1000.0, 0.0)
    assert not overlap.pays(0.25)
