"""The number of threads of a model: as asked, measured, kept, and never a reason for another text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.kernels.cpu.topology import Core, Machine
from paceline.runner.forwards import thread_choice
from paceline.runner.forwards.thread_choice import choices_folder, choose_threads, fastest, known_choice, measure
from tests.kernels.tiny_forward import PLAIN, compiled, rows_of

FOUR = Machine(tuple(Core((cpu,), 0, False) for cpu in range(4)))


class Passes:
    """Passes of made-up length, on a clock of their own."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.ran: list[int] = []

    def run(self, count: int) -> Callable[[], None]:
        def pass_() -> None:
            self.ran.append(count)
            self.now += self.seconds[count]

        return pass_

    def runs(self) -> dict[int, Callable[[], None]]:
        return {count: self.run(count) for count in self.seconds}


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(thread_choice, "read_machine", lambda: FOUR)


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({4: 1.0, 2: 2.0, 1: 4.0}, 4),
        ({4: 1.0, 2: 0.9, 1: 4.0}, 4),  # not by more than noise
        ({4: 1.0, 2: 0.8, 1: 0.7}, 1),
    ],
)
def test_the_fastest_is_chosen(seconds: dict[int, float], threads: int) -> None:
    choice = fastest(seconds)
    assert choice.threads == threads
    assert "measured" in choice.why


def test_a_measurement_takes_turns_and_ends() -> None:
    passes = Passes({4: 0.01, 2: 0.02})
    assert measure(passes.runs(), clock=lambda: passes.now, waited=lambda: 0.0) == pytest.approx(passes.seconds)
    assert passes.ran[:4] == [4, 2, 4, 2]
    assert passes.now < thread_choice.MEASURE_SECONDS + 0.1
    slow = Passes({4: 5.0, 2: 10.0})
    measure(slow.runs(), clock=lambda: slow.now, waited=lambda: 0.0)
    assert len(slow.ran) == 2 * (1 + thread_choice.MIN_PASSES)


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    passes = Passes({4: 1.0, 2: 0.1, 1: 0.1})
    assert measure(passes.runs(), clock=lambda: passes.now, waited=lambda: passes.now / 4) is None
    monkeypatch.setattr(thread_choice, "measure", lambda runs: None)
    choice = choose_threads(None, "a model", passes.run)
    assert choice.threads == 4
    assert "busy" in choice.why
    assert known_choice(None, "a model", FOUR) is None, "nothing is kept"


def test_a_choice_is_kept_by_machine_and_model(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    monkeypatch.setattr(thread_choice, "measure", lambda runs: {4: 2.0, 2: 1.0, 1: 3.0})
    assert choose_threads(None, "a model", Passes({4: 0, 2: 0, 1: 0}).run).threads == 2
    monkeypatch.setattr(thread_choice, "measure", lambda runs: pytest.fail("measured twice"))
    again = choose_threads(None, "a model", Passes({}).run)
    assert again.threads == 2
    assert known_choice(None, "another model", FOUR) is None
    assert known_choice(None, "a model", Machine(FOUR.cores[:2])) is None
    [note] = choices_folder().iterdir()
    assert json.loads(note.read_text()) == {"4": 2.0, "2": 1.0, "1": 3.0}
    note.write_text("damaged")
    assert known_choice(None, "a model", FOUR) is None


def test_a_given_number_is_used(four_cores: None) -> None:
    choice = choose_threads(3, "a model", lambda count: pytest.fail("measured"))
    assert (choice.threads, choice.why) == (3, "as asked for")


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "read_machine", lambda: Machine(FOUR.cores[:1]))
    assert choose_threads(None, "a model", lambda count: pytest.fail("measured")).threads == 1


def won_by(winner: int, runs: dict[int, Callable[[], None]]) -> dict[int, float]:
    """Run every candidate, and let one win."""
    for run in runs.values():
        run()
    return {count: 1.0 if count == winner else 2.0 for count in runs}


def test_the_choice_changes_no_bit(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    """Whatever the stopwatch says, the logits are the same."""
    tokens, found = [5, 7, 11, 13], []
    monkeypatch.setattr(thread_choice, "_kept", lambda note: None)
    for winner in (4, 2, 1):
        monkeypatch.setattr(thread_choice, "measure", partial(won_by, winner))
        forward = compiled(PLAIN, "int4", num_pages=2)
        assert forward.threads == winner
        found.append(forward(rows_of((tokens, 0, 4, [1]))).logits.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
