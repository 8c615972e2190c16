"""The profile of the host, from events as the profiler reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from peers.host_profile import summary

LAUNCH, WAIT = "cudaGraphLaunch", "cudaEventSynchronize"


def event(name: str, start: float, end: float, *, host: bool = True) -> Any:
    kind = DeviceType.CPU if host else DeviceType.CUDA
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


def calls(*names: str) -> list[Any]:
    return [event(name, at, at + 1) for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "rounds", "queued"),
    [
        ((LAUNCH, WAIT, LAUNCH, WAIT), 2, 2),  # each launched before the host waits for the one before
        ((LAUNCH, WAIT, WAIT, LAUNCH, WAIT, WAIT), 2, 2),  # several waits for one round
        ((WAIT, LAUNCH, WAIT, LAUNCH), 2, 0),  # the device has nothing to do behind the round that the host waits for
        ((WAIT, LAUNCH, LAUNCH, WAIT), 2, 1),
    ],
)
def test_a_round_is_queued_before_the_host_waits(names: tuple[str, ...], rounds: int, queued: int) -> None:
    found = summary(calls(*names), rounds=2)
    assert (found["rounds_waited_for"], found["next_round_queued"]) == (rounds, queued)
    assert found["graph_launches"] == names.count(LAUNCH)
    assert found["waits_a_round"] == {WAIT: names.count(WAIT) / 2}


def test_calls_that_wait_and_the_idle_share() -> None:
    names = ("cudaMemcpyAsync", "cudaMemcpy", "cudaMalloc", LAUNCH)
    busy = [event("kernel", 0, 4, host=False), event("kernel", 2, 5, host=False), event("kernel", 8, 10, host=False)]
    found = summary([*calls(*names), *busy], rounds=1)
    assert found["waits_a_round"] == {"cudaMemcpy": 1, "cudaMalloc": 1}
    assert found["device_idle"] == pytest.approx(0.3)
