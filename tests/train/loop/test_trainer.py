"""The loop alone, around a student of one number: pace, early stop, and how it fails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import OutOfMemory, TrainingError
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates
from paceline.train.loop import trainer as module
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.parallel import World
from paceline.train.loop.score import Score
from paceline.train.loop.trainer import ProgressReport, Schedule, Trainer
from paceline.train.students.labels import Aim
from paceline.train.students.student import Losses

CPU = torch.device("cpu")


class Weight:
    """Learns nothing; `said` is its loss."""

    kind = "toy"

    def __init__(self) -> None:
        self.params = {"w": torch.ones(2).requires_grad_()}
        self.constants: dict[str, Tensor] = {}
        self.said = 1.0
        self.rates: list[float] = []
        self.seen: list[int] = []

    def losses(self, teacher: object, states: object, texts: TextBatch, aim: Aim) -> Losses:
        self.seen.append(int(texts.ids[0, 0]))
        loss = self.params["w"].sum()
        return Losses(loss, by_step=torch.tensor([self.said]), agreement=torch.tensor([0.5]))


class Nothing:
    """A teacher who says nothing."""

    def __call__(self, ids: Tensor) -> TargetStates:
        return TargetStates(features=torch.empty((*ids.shape, 0)), hidden=torch.empty((*ids.shape, 1)))


def trainer_of(path: Path, student: Any, **schedule: Any) -> Trainer:
    settings: dict[str, Any] = {"minutes": 1.0, "max_steps": 40, "batch_tokens": 16, "learning_rate": 1.0, "seed": 0}
    exchanges = [Exchange(np.full(8, i, dtype=np.int32), 2) for i in range(10)]
    return Trainer(
        student=student,
        teacher=Nothing(),
        train=exchanges,
        held_out=exchanges[:1],
        schedule=Schedule(**settings | schedule),
        world=World(rank=0, size=1, device=CPU),
        path=path / "checkpoint",
        progress=Progress(settings={}),
        on_report=lambda line: None,
        on_score=lambda progress, score, better: None,
    )


@pytest.fixture(autouse=True)
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What evaluations find, in turn; then always the last."""
    found = [2.0]

    def evaluate(*args: object, **options: object) -> Score:
        value = found.pop(0) if len(found) > 1 else found[0]
        return Score(draft=1, rounds=100, accepted=(round(100 * (value - 1)),))

    monkeypatch.setattr(module, "evaluate", evaluate)
    return found


def test_the_learning_rate_rises_and_ends_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, Weight(), patience=100)
    rates: list[float] = []
    monkeypatch.setattr(trainer.optimiser, "step", rates.append)
    trainer.run()
    assert len(rates) == 40
    assert rates[0] == pytest.approx(0.25)
    assert max(rates) == pytest.approx(rates[3])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 40)


def test_every_exchange_is_seen_once_an_epoch(tmp_path: Path) -> None:
    student = Weight()
    trainer = trainer_of(tmp_path, student, max_steps=20, patience=100)
    trainer.run()
    assert sorted(student.seen[:10]) == sorted(student.seen[10:]) == list(range(10))
    assert student.seen[:10] != student.seen[10:]
    assert trainer.progress.epoch == 1


def test_it_stops_when_nothing_becomes_better(tmp_path: Path, scores: list[float]) -> None:
    scores[:] = [2.0, 2.5, 2.4]
    trainer = trainer_of(tmp_path, Weight(), evaluations=20, patience=3)
    trainer.run()
    assert trainer.progress.step == 10  # evaluations at 2, 4 (the best), 6, 8 and 10
    assert trainer.progress.best == 2.5
    assert trainer.progress.best_step == 4
    assert trainer.progress.finished


def test_what_a_student_was_worth_before_is_no_reason_to_stop(tmp_path: Path, scores: list[float]) -> None:
    """It is the best for long, and kept as the best, but training goes on as long as it becomes better again."""
    scores[:] = [2.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8, 2.95]
    trainer = trainer_of(tmp_path, Weight(), evaluations=10, patience=3)
    trainer.score_first = True
    trainer.run()
    assert [record["step"] for record in trainer.progress.history] == [*range(0, 41, 4)]
    assert (trainer.progress.best, trainer.progress.best_step) == (2.95, 40)


def test_it_stops_all_the_same_when_it_goes_nowhere(tmp_path: Path, scores: list[float]) -> None:
    scores[:] = [2.9, 2.0, 2.1, 2.0]
    trainer = trainer_of(tmp_path, Weight(), evaluations=10, patience=3)
    trainer.score_first = True
    trainer.run()
    assert trainer.progress.step == 20  # evaluations at 0 (the best), 4, 8 (better again), 12, 16 and 20
    assert (trainer.progress.best, trainer.progress.best_step) == (2.9, 0)


def test_what_is_to_overlap_is_judged_by_what_overlaps(tmp_path: Path, scores: list[float]) -> None:
    """The most likely tokens are guessed worse all the time, and the distributions come closer until the last."""
    scores[:] = [2.9, 2.8, 2.7, 2.6, 2.5]
    student = Weight()
    trainer = trainer_of(tmp_path, student, evaluations=4, patience=100)
    trainer.aim = "overlap"
    distances = [0.9, 0.5, 0.4, 0.7]
    find = module.closeness

    def closeness(*args: Any, **options: Any) -> float:
        student.said = distances.pop(0)
        return find(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "closeness", closeness)
        trainer.run()
    assert trainer.progress.best_step == 30
    assert trainer.progress.best == pytest.approx(math.exp(-0.4))
    assert [record["worth"] for record in trainer.progress.history] == pytest.approx(
        [math.exp(-far) for far in (0.9, 0.5, 0.4, 0.7)]
    )


def test_evaluations_are_spread_evenly(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Weight(), evaluations=4, patience=100)
    trainer.run()
    assert [record["step"] for record in trainer.progress.history] == [10, 20, 30, 40]


def test_minutes_end_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what came before a kill counts."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", clock)
    trainer = trainer_of(tmp_path, Weight(), max_steps=None, minutes=1.0, patience=100)
    trainer.progress.seconds = 40.0
    trainer.run()
    assert 15 <= trainer.progress.step <= 20


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    student = Weight()
    student.said = float("nan")
    with pytest.raises(TrainingError, match="lower --learning-rate; the last checkpoint is kept"):
        trainer_of(tmp_path, student).run()
    assert not (tmp_path / "checkpoint").exists(), "a checkpoint of what is no number"


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Weight()

    def losses(*args: object) -> Losses:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(student, "losses", losses)
    with pytest.raises(OutOfMemory, match="a batch of 16 tokens: lower --batch-tokens"):
        trainer_of(tmp_path, student).run()


def test_lines_say_how_it_goes(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Weight(), patience=100)
    lines: list[ProgressReport] = []
    trainer.on_report = lines.append
    trainer.run()
    assert lines[-1].done == 1.0
    assert lines[-1].loss == (1.0,)
    assert lines[-1].agreement == (0.5,)
    assert lines[-1].seconds_left == 0.0
    assert trainer.progress.tokens == 40 * 16
