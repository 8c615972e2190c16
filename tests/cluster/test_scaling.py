"""How many replicas a load asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.cluster.scaling import Load, Policy, loads

POLICY = Policy(target_waiting=4, target_kv_usage=0.8)


def load(running: float = 0, waiting: float = 0, kv_usage: float = 0.0) -> Load:
    return Load(running, waiting, kv_usage, places=10)


@pytest.mark.parametrize(
    ("reported", "now", "wanted"),
    [
        ([load()], 1, 1),
        ([load(10)], 1, 1),  # full, but nobody waits
        ([load(10, 3)], 1, 1),  # fewer wait than may
        ([load(10, 4)], 1, 2),
        ([load(10, 30)], 1, 6),
        ([load(2, 0, 0.79)], 1, 1),
        ([load(2, 0, 0.9)], 1, 2),
        ([load(10, 8), load()], 2, 3),
        ([load(10, 6), load()], 2, 2),
        ([load(3), load(3)], 2, 1),
        ([load(4), load(4)], 2, 2),  # one replica would be more than 70 % full
        ([load(1, 0, 0.5), load(1, 0, 0.5)], 2, 2),  # and one has no pages for both
        ([load(10, 4)], 3, 3),  # others have been asked for and have not reported
        ([], 2, 2),
    ],
)
def test_replicas_for_a_load(reported: list[Load], now: int, wanted: int) -> None:
    assert POLICY.wanted(reported, now=now) == wanted


def test_strain_takes_no_replica_away() -> None:
    assert POLICY.wanted([load(0, 9), load(), load(0, 9)], now=5) == 5


def test_the_policy_reads_what_replicas_report() -> None:
    metrics = {"running": {"x": 10.0, "y": 1.0}, "waiting": {"x": 8.0}, "kv_usage": {"x": 0.1}, "places": {"x": 10.0}}
    assert loads(metrics) == [Load(10.0, 8.0, 0.1, 10.0)]
    assert POLICY(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=1)) == (3, {})
    assert POLICY(SimpleNamespace(aggregated_metrics=None, target_num_replicas=4)) == (4, {})
