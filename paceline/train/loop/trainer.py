"""The trainer: batches, gradients, a learning rate that falls to zero, evaluations, checkpoints.

Progress of a training, from 0 to 1, is steps / `max_steps`, or else seconds / (60 * `minutes`). It decides when to
evaluate and, after a warm-up by steps, the learning rate. After a kill the loop resumes from the last checkpoint with
the batch that followed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import OutOfMemory, TrainingError
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch, epoch_batches, pad
from paceline.train.data.state_cache import StateCache, cache_bytes
from paceline.train.data.teacher import Teacher
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.optimiser import Optimiser
from paceline.train.loop.parallel import World
from paceline.train.loop.score import Score, closeness, evaluate
from paceline.train.phases import Phases, Unseen
from paceline.train.students.labels import Aim
from paceline.train.students.student import Losses, Student

MAX_GRADIENT_NORM = 1.0
WARM_UP_STEPS = 100  # at most a tenth of `max_steps`, if that is given
REPORT_SECONDS = 5.0  # between two progress reports
SAVE_SECONDS = 120.0  # between two checkpoints, if no evaluation comes before
LARGEST_LOSS = 1e6  # nats; beyond it training has diverged


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length, learning rate and evaluations of a training."""

    minutes: float
    max_steps: int | None  # None: the minutes decide
    batch_tokens: int
    learning_rate: float  # its peak
    seed: int
    draft: int = 4  # tokens of a draft in evaluations
    evaluations: int = 24  # number in all, evenly spread
    patience: int = 8  # evaluations without improvement before training stops


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """The state of a training, reported every few seconds."""

    progress: Progress
    done: float  # progress from 0 to 1
    loss: tuple[float, ...]  # distance from the target by draft step, in nats
    agreement: tuple[float, ...]  # share of best guesses that are the target's, by draft step
    tokens_per_second: float
    seconds_left: float


@dataclass(slots=True)
class Trainer:
    student: Student
    teacher: Teacher
    train: Sequence[Exchange]
    held_out: Sequence[Exchange]
    schedule: Schedule
    world: World
    path: Path  # checkpoint file
    progress: Progress
    on_report: Callable[[ProgressReport], None]
    on_score: Callable[[Progress, Score, bool], None]  # an evaluation, and whether it is the best so far
    phases: Phases = field(default_factory=Unseen)
    aim: Aim = "likelihood"
    score_first: bool = False  # evaluate before the first step: the student starts from a trained head
    best: dict[str, Tensor] = field(default_factory=dict)
    optimiser: Optimiser = field(init=False)
    _states: StateCache = field(init=False)
    _started: float = field(init=False, default=0.0)
    _saved: float = field(init=False, default=0.0)
    _recent: list[Losses] = field(init=False, default_factory=list)
    _reported: tuple[float, int] = field(init=False, default=(0.0, 0))  # seconds and tokens at the last report

    def __post_init__(self) -> None:
        self.optimiser = Optimiser(self.student.params, learning_rate=self.schedule.learning_rate)
        self._states = StateCache(self.teacher, self.train, max_bytes=cache_bytes(self.world.device))

    def run(self) -> None:
        """Train until the schedule or the patience ends."""
        self._started = time.monotonic() - self.progress.seconds
        self._saved = self.progress.seconds
        self._reported = (self.progress.seconds, self.progress.tokens)
        try:
            if self.score_first and not self.progress.history:
                self._evaluate()
            self._begin_phase()
            for indices, texts in self._batches():
                self._step(indices, texts.to(self.world.device))
                if self._report_evaluate_save():
                    break
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no memory for a batch of {self.schedule.batch_tokens} tokens: lower --batch-tokens; what was trained "
                "so far is kept"
            ) from error
        self.progress.finished = True
        self._save()

    def _begin_phase(self) -> None:
        unit = "seconds" if self.schedule.max_steps is None else "steps"
        done, total = self._amount()
        self.phases.phase("training", unit=unit, total=total, done=done)

    def _amount(self) -> tuple[int, int]:
        """Return how much of the schedule is done and how much there is, in steps or seconds."""
        if self.schedule.max_steps is not None:
            return self.progress.step, self.schedule.max_steps
        return int(self.progress.seconds), int(60 * self.schedule.minutes)

    def done(self) -> float:
        """Progress from 0 to 1."""
        if self.schedule.max_steps is not None:
            return self.progress.step / self.schedule.max_steps
        return self.progress.seconds / (60 * self.schedule.minutes)

    def _batches(self) -> Iterator[tuple[list[int], TextBatch]]:
        """Yield this process' batches, epoch after epoch, from the next one on. All processes get equally many."""
        world, progress = self.world, self.progress
        while True:
            every = epoch_batches(
                self.train, tokens=self.schedule.batch_tokens, seed=self.schedule.seed, epoch=progress.epoch
            )
            count = max(1, len(every) // world.size)
            while progress.batch < count:
                mine = every[(progress.batch * world.size + world.rank) % len(every)]
                progress.batch += 1
                yield mine, pad([self.train[index] for index in mine])
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _step(self, indices: list[int], texts: TextBatch) -> None:
        params = list(self.student.params.values())
        losses = self.student.losses(self.teacher, self._states(indices, texts), texts, self.aim)
        losses.total.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.world.average(param.grad for param in params if param.grad is not None)
        torch.nn.utils.clip_grad_norm_(params, MAX_GRADIENT_NORM)
        self.optimiser.step(self._rate())
        self._recent.append(Losses(losses.total.detach(), losses.by_step, losses.agreement))
        self.progress.step += 1
        self.progress.tokens += texts.ids.numel() * self.world.size
        self.progress.seconds = self.world.broadcast(time.monotonic() - self._started)
        self.phases(*self._amount())

    def _rate(self) -> float:
        """Share of the peak learning rate: a short warm-up, then linearly down to 0."""
        steps = self.schedule.max_steps
        warm_up = WARM_UP_STEPS if steps is None else min(WARM_UP_STEPS, max(1, steps // 10))
        return min(1.0, (self.progress.step + 1) / warm_up) * max(0.0, 1.0 - self.done())

    def _report_evaluate_save(self) -> bool:
        """Report, evaluate and save if it is time to; return True if training is over."""
        done, progress = self.done(), self.progress
        evaluates = int(done * self.schedule.evaluations) > len(progress.history) - self.score_first or done >= 1
        saves = progress.seconds - self._saved >= SAVE_SECONDS
        if evaluates or saves or progress.seconds - self._reported[0] >= REPORT_SECONDS:
            self._report(done)  # raises if the loss is not finite, before such weights are saved
        if evaluates:
            return self._evaluate() or done >= 1
        if saves:
            self._save()
        return False

    def _report(self, done: float) -> None:
        progress, recent = self.progress, self._recent
        loss = torch.stack([one.by_step for one in recent]).mean(dim=0).tolist()
        agreement = torch.stack([one.agreement for one in recent]).mean(dim=0).tolist()
        self._recent = []
        if not all(abs(value) < LARGEST_LOSS for value in loss):
            raise TrainingError(
                f"the loss at step {progress.step} is not a number: lower --learning-rate; the last checkpoint is kept"
            )
        seconds, tokens = progress.seconds - self._reported[0], progress.tokens - self._reported[1]
        self._reported = (progress.seconds, progress.tokens)
        left = progress.seconds * (1 / done - 1) if done else 0.0
        progress.curve.append({"step": progress.step, "loss": loss[0], "agreement": agreement[0]})
        self.on_report(
            ProgressReport(
                progress=progress,
                done=done,
                loss=tuple(loss),
                agreement=tuple(agreement),
                tokens_per_second=tokens / max(seconds, 1e-6),
                seconds_left=max(0.0, left),
            )
        )

    def _evaluate(self) -> bool:
        """Evaluate in the first process and save; return True, in all processes, if the patience has ended."""
        stop = 0.0
        if self.world.first:
            stop = float(self._score())
            self._save()
        stop = self.world.broadcast(stop)
        # The length of the history decides when the next evaluation is due: it must be the same in all processes.
        count = int(self.world.broadcast(len(self.progress.history)))
        self.progress.history += [{}] * (count - len(self.progress.history))
        return bool(stop)

    def _score(self) -> bool:
        """Score the student on the held-out prompts and keep its weights if they are the best so far; return True if
        the patience has ended."""
        progress, schedule = self.progress, self.schedule
        self.phases.phase(f"measuring after step {progress.step}, on {len(self.held_out)} prompts")
        score = evaluate(
            self.student,
            self.teacher,
            self.held_out,
            draft=schedule.draft,
            tokens=schedule.batch_tokens,
            device=self.world.device,
        )
        worth = self._worth(score)
        better = worth > progress.best
        if better:
            progress.best, progress.best_step = worth, progress.step
            self.best = {name: tensor.detach().clone() for name, tensor in self.student.params.items()}
        found = {"held_out": score.tokens_per_round, "worth": worth}
        progress.history.append({"step": progress.step, "seconds": progress.seconds, **found})
        self.on_score(progress, score, better)
        self._begin_phase()
        return self._stuck()

    def _worth(self, score: Score) -> float:
        """Return the number by which evaluations are compared. For the aim `likelihood` it is tokens per round, which
        counts greedy tokens; for `overlap` it is how closely the distributions overlap, which covers sampled tokens
        too."""
        if self.aim == "likelihood":
            return score.tokens_per_round
        tokens, device = self.schedule.batch_tokens, self.world.device
        return closeness(self.student, self.teacher, self.held_out, aim=self.aim, tokens=tokens, device=device)

    def _stuck(self) -> bool:
        """Whether the last `patience` evaluations brought no improvement. The evaluation before the first step does not
        count: a learning rate that is large again first makes a trained head worse, and better only as it falls."""
        found = [record["worth"] for record in self.progress.history if record["step"]]
        last, before = found[-self.schedule.patience :], found[: -self.schedule.patience]
        return bool(before) and max(last) <= max(before)

    def _save(self) -> None:
        """Write a checkpoint; only the first process does."""
        if self.world.first:
            checkpoint.save(
                self.path, self.progress, self.student.params, self.best, self.student.constants, self.optimiser
            )
        self._saved = self.progress.seconds
