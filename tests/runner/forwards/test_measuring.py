"""The number of threads of a model, and measurements in general: in turns, kept, no reason for another text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.topology import Core, Machine
from paceline.runner.forwards import measuring, thread_choice
from paceline.runner.forwards.measuring import RunPass, best_of, kept_times, measure, measurements_folder
from paceline.runner.forwards.thread_choice import choose_threads, known_choice
from tests.kernels.tiny_forward import PLAIN, compiled, rows_of

FOUR = Machine(tuple(Core((cpu,), 0, False) for cpu in range(4)))


class Passes:
    """Passes of made-up length, on a clock of their own."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.ran: list[str] = []

    def run(self, name: str) -> Callable[[], None]:
        def pass_() -> None:
            self.ran.append(name)
            self.now += self.seconds[name]

        return pass_

    def runs(self) -> dict[str, RunPass]:
        return {name: self.run(name) for name in self.seconds}


def use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (measuring, thread_choice):
        monkeypatch.setattr(module, "read_machine", lambda: machine)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_library()  # from the cache that all tests share: in an empty one it would be compiled
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    use(FOUR, monkeypatch)


def never(count: int) -> RunPass:
    pytest.fail("measured")


def at_once(count: int) -> RunPass:
    return lambda: None


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"4": 1.0, "2": 2.0, "1": 4.0}, "4"),
        ({"4": 1.0, "2": 0.9, "1": 4.0}, "4"),  # not by more than noise
        ({"4": 1.0, "2": 0.8, "1": 0.7}, "1"),
    ],
)
def test_the_fastest_is_chosen(seconds: dict[str, float], best: str) -> None:
    assert best_of(seconds) == best


def test_a_measurement_takes_turns_and_ends() -> None:
    passes = Passes(a=0.01, b=0.02)
    assert measure(passes.runs(), clock=lambda: passes.now, waited=lambda: 0.0) == pytest.approx(passes.seconds)
    assert passes.ran[:4] == ["a", "b", "a", "b"]
    assert passes.now < measuring.MEASURE_SECONDS + 0.1
    slow = Passes(a=5.0, b=10.0)
    measure(slow.runs(), clock=lambda: slow.now, waited=lambda: 0.0)
    assert len(slow.ran) == 2 * (1 + measuring.MIN_PASSES)
    quick = Passes(a=1e-6, b=1e-6)
    measure(quick.runs(), clock=lambda: quick.now, waited=lambda: 0.0)
    assert len(quick.ran) == 2 * (1 + measuring.MAX_PASSES)


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    passes = Passes(a=1.0, b=0.1)
    assert measure(passes.runs(), clock=lambda: passes.now, waited=lambda: passes.now / 4) is None
    monkeypatch.setattr(measuring, "measure", lambda runs: None)
    choice = choose_threads(None, "a model", at_once)
    assert choice.threads == 4
    assert "busy" in choice.why
    assert not measurements_folder().exists(), "nothing is kept"


def test_a_choice_is_kept_by_machine_and_model(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    assert known_choice(None, "a model").why == "until the first start measures"
    monkeypatch.setattr(measuring, "measure", lambda runs: {"4": 2.0, "2": 1.0, "1": 3.0})
    assert choose_threads(None, "a model", at_once).threads == 2
    assert choose_threads(None, "a model", never).threads == 2
    assert known_choice(None, "a model").threads == 2
    assert "measured: 1000.00 ms a pass, 2000.00 ms with 4" in known_choice(None, "a model").why
    assert known_choice(None, "another model").threads == 4
    question, candidates = ("threads", "a model"), ["4", "2", "1"]
    assert kept_times(question, candidates) == {"4": 2.0, "2": 1.0, "1": 3.0}
    assert kept_times(question, candidates, Machine(FOUR.cores[:2])) is None
    assert kept_times(question, candidates[:2]) is None
    [note] = measurements_folder().iterdir()
    note.write_text(json.dumps([1, 2]))
    assert kept_times(question, candidates) is None


def test_a_given_number_is_used(four_cores: None) -> None:
    choice = choose_threads(3, "a model", never)
    assert (choice.threads, choice.why) == (3, "as asked for")


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Machine(FOUR.cores[:1]), monkeypatch)
    assert choose_threads(None, "a model", never).threads == 1


def won_by(winner: int, runs: dict[str, RunPass]) -> dict[str, float]:
    """Run every candidate, and let one win."""
    for run in runs.values():
        run()
    return {count: 1.0 if count == str(winner) else 2.0 for count in runs}


def test_the_choice_changes_no_bit(monkeypatch: pytest.MonkeyPatch, four_cores: None, tmp_path: Path) -> None:
    """Whatever the stopwatch says, the logits are the same."""
    tokens, found = [5, 7, 11, 13], []
    for winner in (4, 2, 1):
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / str(winner)))
        monkeypatch.setattr(measuring, "measure", partial(won_by, winner))
        forward = compiled(PLAIN, "int4", num_pages=2)
        assert forward.threads == winner
        found.append(forward(rows_of((tokens, 0, 4, [1]))).logits.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
