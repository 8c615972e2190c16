"""The loop: batches, gradients, a learning rate that ends at zero when the time is over, evaluations, checkpoints.

How far a training is, from 0 to 1, is steps by `max_steps` or seconds by `minutes`; the learning rate and the
evaluations go by that alone. After a kill the loop goes on from the last checkpoint with the batch that followed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import EngineDead, OutOfMemory
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import Texts, epoch_batches, pad
from paceline.train.data.insights import Insights, room
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.optimiser import Optimiser
from paceline.train.loop.parallel import World
from paceline.train.loop.score import Score, closeness, evaluate
from paceline.train.students.student import Losses, Student
from paceline.train.students.teacher import Teacher

CLIP = 1.0  # the longest gradient
WARM_UP = 100  # steps, and at most a tenth of all
REPORT = 5.0  # seconds between two lines
SAVE = 120.0  # seconds between two checkpoints, if no evaluation comes before


@dataclass(frozen=True, slots=True)
class Course:
    """How to train."""

    minutes: float
    max_steps: int | None  # None: the minutes decide
    batch_tokens: int
    learning_rate: float
    seed: int
    draft: int = 4  # tokens of a draft, in evaluations
    evaluations: int = 24  # in all, evenly spread
    patience: int = 8  # evaluations without a better one before it stops


@dataclass(frozen=True, slots=True)
class Line:
    """What there is to say every few seconds."""

    progress: Progress
    done: float  # from 0 to 1
    loss: tuple[float, ...]  # by step of the chain
    agreement: tuple[float, ...]
    tokens_per_second: float
    seconds_left: float


@dataclass(slots=True)
class Trainer:
    student: Student
    teacher: Teacher
    train: Sequence[Exchange]
    held_out: Sequence[Exchange]
    course: Course
    world: World
    path: Path  # of the checkpoint
    progress: Progress
    on_line: Callable[[Line], None]
    on_score: Callable[[Progress, Score, bool], None]  # an evaluation, and whether it is the best so far
    begun: bool = False  # the student knows something already: it is measured before the first step
    best: dict[str, Tensor] = field(default_factory=dict)
    optimiser: Optimiser = field(init=False)
    _insights: Insights = field(init=False)
    _began: float = field(init=False, default=0.0)
    _saved: float = field(init=False, default=0.0)
    _recent: list[Losses] = field(init=False, default_factory=list)
    _reported: tuple[float, int] = field(init=False, default=(0.0, 0))

    def __post_init__(self) -> None:
        self.optimiser = Optimiser(self.student.params, learning_rate=self.course.learning_rate)
        self._insights = Insights(self.teacher, self.train, room=room(self.world.device))

    def run(self) -> None:
        self._began = time.monotonic() - self.progress.seconds
        self._saved = self.progress.seconds
        self._reported = (self.progress.seconds, self.progress.tokens)
        try:
            if self.begun and not self.progress.history:
                self._evaluate()
            for indices, texts in self._batches():
                self._step(indices, texts.to(self.world.device))
                if self._look_around():
                    break
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no memory for a batch of {self.course.batch_tokens} tokens: lower --batch-tokens; what was trained "
                "so far is kept"
            ) from error
        self.progress.finished = True
        self._save()

    def done(self) -> float:
        """From 0 to 1."""
        if self.course.max_steps is not None:
            return self.progress.step / self.course.max_steps
        return self.progress.seconds / (60 * self.course.minutes)

    def _batches(self) -> Iterator[tuple[list[int], Texts]]:
        """This process' batches, epoch after epoch, from where the progress stands. All processes get equally many."""
        world, progress = self.world, self.progress
        while True:
            every = epoch_batches(
                self.train, tokens=self.course.batch_tokens, seed=self.course.seed, epoch=progress.epoch
            )
            count = max(1, len(every) // world.size)
            while progress.batch < count:
                mine = every[(progress.batch * world.size + world.rank) % len(every)]
                progress.batch += 1
                yield mine, pad([self.train[index] for index in mine])
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _step(self, indices: list[int], texts: Texts) -> None:
        params = list(self.student.params.values())
        losses = self.student.losses(self.teacher, self._insights(indices, texts), texts)
        losses.total.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.world.average(param.grad for param in params if param.grad is not None)
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        self.optimiser.step(self._rate())
        self._recent.append(Losses(losses.total.detach(), losses.by_step, losses.agreement))
        self.progress.step += 1
        self.progress.tokens += texts.ids.numel() * self.world.size
        self.progress.seconds = self.world.told(time.monotonic() - self._began)

    def _rate(self) -> float:
        """Up quickly, then down to nothing in a straight line."""
        most = self.course.max_steps
        warm_up = WARM_UP if most is None else min(WARM_UP, max(1, most // 10))
        return min(1.0, (self.progress.step + 1) / warm_up) * max(0.0, 1.0 - self.done())

    def _look_around(self) -> bool:
        """Report, evaluate, save, where it is time to. True: training is over."""
        done, progress = self.done(), self.progress
        evaluates = int(done * self.course.evaluations) > len(progress.history) - self.begun or done >= 1
        saves = progress.seconds - self._saved >= SAVE
        if evaluates or saves or progress.seconds - self._reported[0] >= REPORT:
            self._report(done)  # before anything is kept: weights that are no numbers must not be
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
        if not all(value == value and abs(value) < 1e6 for value in loss):
            raise EngineDead(
                f"the loss at step {progress.step} is not a number: lower --learning-rate; the last checkpoint is kept"
            )
        seconds, tokens = progress.seconds - self._reported[0], progress.tokens - self._reported[1]
        self._reported = (progress.seconds, progress.tokens)
        left = progress.seconds * (1 / done - 1) if done else 0.0
        line = Line(progress, done, tuple(loss), tuple(agreement), tokens / max(seconds, 1e-6), max(0.0, left))
        progress.curve.append({"step": progress.step, "loss": loss[0], "agreement": agreement[0]})
        self.on_line(line)

    def _evaluate(self) -> bool:
        """True: it has not become better for long."""
        stop = 0.0
        if self.world.first:
            stop = float(self._judge())
            self._save()
        stop = self.world.told(stop)
        # What the first process has learnt all must count by: when the next evaluation is.
        self.progress.history += [{}] * (int(self.world.told(len(self.progress.history))) - len(self.progress.history))
        return bool(stop)

    def _judge(self) -> bool:
        progress, course = self.progress, self.course
        score = evaluate(
            self.student,
            self.teacher,
            self.held_out,
            draft=course.draft,
            tokens=course.batch_tokens,
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
        return self._stuck()

    def _worth(self, score: Score) -> float:
        """What a better drafter has more of: tokens per round, which are the most likely ones; for one that is to be
        right with drawn tokens too, what overlaps."""
        if self.teacher.aim == "likelihood":
            return score.tokens_per_round
        tokens, device = self.course.batch_tokens, self.world.device
        return closeness(self.student, self.teacher, self.held_out, tokens=tokens, device=device)

    def _stuck(self) -> bool:
        """What the student was worth before the first step does not count: a learning rate that is large again costs
        some of it, and brings it back only while it falls."""
        found = [record["worth"] for record in self.progress.history if record["step"]]
        last, before = found[-self.course.patience :], found[: -self.course.patience]
        return bool(before) and max(last) <= max(before)

    def _save(self) -> None:
        if self.world.first:
            checkpoint.save(
                self.path, self.progress, self.student.params, self.best, self.student.constants, self.optimiser
            )
        self._saved = self.progress.seconds
