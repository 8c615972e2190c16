"""From a target and a file of prompts to a drafter: answer, begin, train, measure, write.

Whatever is done is kept under `Job.work`; the same command goes on where the last one ended, however it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paceline.errors import InvalidRequest
from paceline.models.load import LoadedModel, load_model, open_model
from paceline.models.weights import Format
from paceline.runner.loading.memory import memory_for
from paceline.train.data.answering import Crew, answer
from paceline.train.data.answers import HELD_OUT, TRAIN, AnswerStore, Exchange, Question
from paceline.train.data.batches import in_order
from paceline.train.data.prompts import read_prompts, sources
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.parallel import World
from paceline.train.loop.score import Score, evaluate
from paceline.train.loop.trainer import Course, Line, Trainer
from paceline.train.options import Curriculum, Job, curriculum
from paceline.train.output.card import Facts, card
from paceline.train.output.curves import curves
from paceline.train.output.storage import replace_folder
from paceline.train.students.eagle import EagleHead
from paceline.train.students.kinds import Beginning, begin, read_drafter
from paceline.train.students.published import beginning
from paceline.train.students.student import Student

Say = Callable[[str], None]
STUDIED = 256  # answers, to see how a head's rows are spread


@dataclass(slots=True)
class Lesson:
    """One training, from the questions to the drafter."""

    job: Job
    world: World
    say: Say
    plan: Curriculum
    sets: dict[str, list[Exchange]]
    start: Beginning
    progress: Progress

    def facts(self, scores: Mapping[str, tuple[int, Score]]) -> Facts:
        job, trained, vocabulary = self.job, self.sets[TRAIN], self.start.vocabulary
        return Facts(
            kind=job.kind,
            target=job.target.rstrip("/").rpartition("/")[2],
            license=job.license,
            parameters=sum(param.numel() for param in self.start.student.params.values()),
            packing=job.packing,
            scores=scores,
            sources=sources(self.plan.trained),
            left_out=self.plan.left_out,
            answers=len(trained),
            answer_tokens=sum(exchange.answer for exchange in trained),
            sampled=self.plan.sampled,
            temperature=job.temperature,
            vocabulary=(len(vocabulary.ids), vocabulary.coverage) if vocabulary else None,
            origin=(self.start.origin.name, self.start.origin.license) if self.start.origin else None,
            steps=self.progress.best_step,
            minutes=self.progress.seconds / 60,
            device=_device_name(self.world),
            command=job.command,
            max_new=job.max_new,
        )

    def write(self, scores: Mapping[str, tuple[int, Score]]) -> None:
        files = self.start.student.files()
        files["README.md"] = card(self.facts(scores))
        files["curves.svg"] = curves(self.progress.curve, self.progress.history)
        replace_folder(self.job.out, files)

    def on_score(self, progress: Progress, score: Score, better: bool) -> None:
        shares = " ".join(f"{share:.3f}" for share in score.by_position)
        note = "  (best)" if better else ""
        self.say(f"held-out: {score.tokens_per_round:.3f} tokens per round, accepted by position {shares}{note}")
        if better:
            self.write({HELD_OUT: (len(self.sets[HELD_OUT]), score)})

    def on_line(self, line: Line) -> None:
        if self.world.first:
            loss, agreement = (" ".join(f"{value:.3f}" for value in values) for values in (line.loss, line.agreement))
            self.say(
                f"{line.done:4.0%} step {line.progress.step} epoch {line.progress.epoch}  loss {loss}  "
                f"agrees {agreement}  {line.tokens_per_second / 1e3:.1f}k tok/s  {line.seconds_left / 60:.1f} min left"
            )


def train(job: Job, say: Say) -> dict[str, Score]:
    """The drafter in `job.out`; what came of each set that it was measured on."""
    world = World.join(job.device)
    try:
        return _train(job, world, say if world.first else lambda text: None)
    finally:
        world.leave()


def _train(job: Job, world: World, say: Say) -> dict[str, Score]:
    if job.begin is not None:
        beginning(job, open_model(job.target).config)  # what does not fit is said before anything is answered
    plan = curriculum(job)
    say(f"{len(plan.trained)} prompts to train on, {job.held_out} held out, {plan.left_out} left out for overlap")
    sets = _answers(job, plan, world, say)
    model = _load(job, world.device)
    lesson = _begin(job, plan, sets, model, world, say)
    trainer = _trainer(lesson)
    if trainer.progress.finished:
        say("training had already ended; measuring")
    else:
        trainer.run()
    return _finish(lesson, trainer) if world.first else {}


def _answers(job: Job, plan: Curriculum, world: World, say: Say) -> dict[str, list[Exchange]]:
    if world.first:
        AnswerStore.create(job.work / "answers", job.answers, plan.questions)
    world.wait()
    store = AnswerStore.create(job.work / "answers", job.answers, plan.questions)
    crew = Crew(
        device=job.device,
        batch=job.answer_batch,
        workers=job.answer_workers,
        threads=job.threads,
        part=world.rank,
        parts=world.size,
    )
    began, last = time.monotonic(), [0.0]

    def report(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= 5 or done == total:
            last[0] = now
            say(f"answers: {done}/{total} shards, {now - began:.0f} s")

    answer(store, crew, report)
    world.wait()
    sets = store.read()
    tokens = sum(exchange.answer for exchange in sets[TRAIN])
    say(f"{len(sets[TRAIN])} answers with {tokens} tokens to learn from")
    for name, exchanges in sets.items():
        if not exchanges:
            raise InvalidRequest(f"no prompt of the set {name!r} got an answer: raise --max-length ({job.max_length})")
    return sets


def _load(job: Job, device: torch.device) -> LoadedModel:
    """The target as the drafter will meet it."""
    whole: Format = "bf16" if device.type == "cuda" else "fp32"
    with memory_for(f"the weights of {job.target}", "choose a smaller target"):
        return load_model(job.target, format=job.serving or whole, device=device)


def _begin(
    job: Job, plan: Curriculum, sets: dict[str, list[Exchange]], model: LoadedModel, world: World, say: Say
) -> Lesson:
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    start = begin(job, model, sets[TRAIN], device=world.device)
    start.teacher.aim = job.aim
    if start.vocabulary is not None:
        tokens, coverage = len(start.vocabulary.ids), start.vocabulary.coverage
        say(f"draft vocabulary: {tokens} tokens, {coverage:.2%} of the answers")
    return Lesson(job, world, say, plan, sets, start, Progress(settings=_settings(job, world)))


def _settings(job: Job, world: World) -> dict[str, object]:
    """What must not change between two runs of one training."""
    shape = ("kind", "draft_vocab", "unroll", "intermediate", "heads", "hidden", "layers", "packing", "serving")
    course = ("aim", "batch_tokens", "learning_rate", "max_steps", "seed", "begin")
    return {name: getattr(job, name) for name in shape + course} | {"processes": world.size}


def _trainer(lesson: Lesson) -> Trainer:
    """New, or from the checkpoint that is there."""
    job, path = lesson.job, lesson.job.work / "checkpoint.safetensors"
    course = Course(
        minutes=job.minutes,
        max_steps=job.max_steps,
        batch_tokens=job.batch_tokens,
        learning_rate=job.learning_rate,
        seed=job.seed,
        evaluations=job.evaluations,
        draft=job.draft,
    )
    groups: dict[str, dict[str, torch.Tensor]] = {}
    if path.exists():
        lesson.progress, groups = checkpoint.load(path, lesson.progress.settings)
        lesson.say(f"going on from step {lesson.progress.step}, {lesson.progress.seconds / 60:.1f} minutes of training")
    trainer = Trainer(
        student=lesson.start.student,
        teacher=lesson.start.teacher,
        begun=lesson.start.origin is not None,
        train=lesson.sets[TRAIN],
        held_out=lesson.sets[HELD_OUT],
        course=course,
        world=lesson.world,
        path=path,
        progress=lesson.progress,
        on_line=lesson.on_line,
        on_score=lesson.on_score,
    )
    if groups:
        _put(lesson.start.student, groups["param"], groups["constant"])
        trainer.best = {name: tensor.to(lesson.world.device) for name, tensor in groups["best"].items()}
        trainer.optimiser.recall(groups)
    return trainer


@torch.no_grad()
def _put(student: Student, params: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in student.params.items():
        tensor.copy_(params[name])
    for name, tensor in student.constants.items():
        tensor.copy_(constants[name])


def _finish(lesson: Lesson, trainer: Trainer) -> dict[str, Score]:
    """Measure the best weights on every set, and write the drafter with its card."""
    if trainer.best:
        _put(lesson.start.student, trainer.best, lesson.start.student.constants)
    student, device = lesson.start.student, lesson.world.device
    if isinstance(student, EagleHead):
        some = in_order(lesson.sets[TRAIN][:STUDIED], tokens=lesson.job.batch_tokens)
        student.study(lesson.start.teacher, (texts.to(device) for texts in some))
    sets = {name: exchanges for name, exchanges in lesson.sets.items() if name != TRAIN}
    scores = _measure(lesson.start, sets, lesson.job, device, lesson.say)
    lesson.write(scores)
    lesson.say(f"written: {lesson.job.out}")
    return {name: score for name, (_, score) in scores.items()}


def _measure(
    there: Beginning, sets: Mapping[str, list[Exchange]], job: Job, device: torch.device, say: Say
) -> dict[str, tuple[int, Score]]:
    scores = {}
    for name, exchanges in sets.items():
        score = evaluate(
            there.student, there.teacher, exchanges, draft=job.draft, tokens=job.batch_tokens, device=device
        )
        scores[name] = (len(exchanges), score)
        shares = " ".join(f"{share:.3f}" for share in score.by_position)
        say(
            f"{name}: {score.tokens_per_round:.3f} tokens per round over {len(exchanges)} prompts, by position {shares}"
        )
    return scores


def measure(job: Job, drafter: Path, say: Say) -> dict[str, Score]:
    """A drafter that is there already, on the sets of the job; nothing is kept."""
    device = torch.device(job.device)
    with TemporaryDirectory() as place:
        questions = [Question(name, one.text) for name, path in job.evals.items() for one in read_prompts(path)]
        store = AnswerStore.create(Path(place) / "answers", job.answers, questions)
        crew = Crew(device=job.device, batch=job.answer_batch, workers=job.answer_workers, threads=job.threads)
        answer(store, crew, lambda done, total: None)
        sets = store.read()
    there = read_drafter(drafter, _load(job, device), device=device)
    scores = _measure(there, sets, job, device, say)
    return {name: score for name, (_, score) in scores.items()}


def _device_name(world: World) -> str:
    if world.device.type == "cpu":
        return "a CPU"
    count = f"{world.size} × " if world.size > 1 else ""
    return f"{count}{torch.cuda.get_device_name(world.device)}"
