"""A training from start to end: answer the prompts, create the student, train it, measure it, write the drafter.

Finished work is kept under `TrainOptions.work`; the same command resumes where the last one ended, however it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.errors import InvalidRequest
from paceline.models.load import open_model
from paceline.train.data.answering import Workers, answer
from paceline.train.data.answers import HELD_OUT, TRAIN, AnswerStore, Exchange
from paceline.train.data.batches import in_order
from paceline.train.data.split import Split, split_prompts
from paceline.train.data.teacher import load_target
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.parallel import World
from paceline.train.loop.score import Score
from paceline.train.loop.trainer import ProgressReport, Schedule, Trainer
from paceline.train.measure import Say, measure_sets
from paceline.train.options import TrainOptions
from paceline.train.output.card import Facts, card
from paceline.train.output.curves import curves
from paceline.train.phases import Phases, Unseen
from paceline.train.storage import replace_folder
from paceline.train.students.kinds import Start, new_student
from paceline.train.students.published import read_initial_head
from paceline.train.students.student import Student

SKETCH_EXCHANGES = 256  # training exchanges that a student's `finish` reads, to fit a sketch


@dataclass(slots=True)
class TrainRun:
    """One training with its answers and its student: the input of the trainer, and the receiver of its reports."""

    options: TrainOptions
    world: World
    say: Say
    phases: Phases
    split: Split
    sets: dict[str, list[Exchange]]
    start: Start
    progress: Progress

    def write(self, scores: Mapping[str, Score]) -> None:
        """Write the drafter with its card and curves."""
        files = self.start.student.files()
        files["README.md"] = card(self._facts(scores))
        files["curves.svg"] = curves(self.progress.curve, self.progress.history)
        replace_folder(self.options.out, files)

    def on_score(self, progress: Progress, score: Score, better: bool) -> None:
        """Say an evaluation's score; write the drafter if it is the best so far."""
        shares = " ".join(f"{share:.3f}" for share in score.by_position)
        note = "  (best)" if better else ""
        self.say(f"held-out: {score.tokens_per_round:.3f} tokens per round, accepted by position {shares}{note}")
        if better:
            self.write({HELD_OUT: score})

    def on_report(self, report: ProgressReport) -> None:
        if self.world.first:
            loss, agreement = (" ".join(f"{value:.3f}" for value in each) for each in (report.loss, report.agreement))
            self.say(
                f"{report.done:4.0%} step {report.progress.step} epoch {report.progress.epoch}  loss {loss}  "
                f"agrees {agreement}  {report.tokens_per_second / 1e3:.1f}k tok/s  "
                f"{report.seconds_left / 60:.1f} min left"
            )

    def _facts(self, scores: Mapping[str, Score]) -> Facts:
        options, trained, vocabulary = self.options, self.sets[TRAIN], self.start.vocabulary
        return Facts(
            kind=options.kind,
            target=options.target.model.rstrip("/").rpartition("/")[2],
            license=options.license,
            parameters=sum(param.numel() for param in self.start.student.params.values()),
            packing=options.packing,
            scores={name: (len(self.sets[name]), score) for name, score in scores.items()},
            sources=self.split.sources,
            left_out=self.split.left_out,
            answers=len(trained),
            answer_tokens=sum(exchange.answer for exchange in trained),
            sampled=self.split.sampled,
            temperature=options.temperature,
            vocabulary=(len(vocabulary.ids), vocabulary.coverage) if vocabulary else None,
            origin=(self.start.origin.name, self.start.origin.license) if self.start.origin else None,
            steps=self.progress.best_step,
            minutes=self.progress.seconds / 60,
            device=_device_name(self.world),
            command=options.command,
            max_new=options.target.max_new,
        )


def train(options: TrainOptions, say: Say, phases: Phases | None = None) -> dict[str, Score]:
    """Train a drafter and write it to `options.out`; return its score on each set that was not trained on."""
    world, shown = World.join(options.target.device), phases or Unseen()
    try:
        return _train(options, world, say if world.first else lambda text: None, shown if world.first else Unseen())
    finally:
        world.leave()


def _train(options: TrainOptions, world: World, say: Say, phases: Phases) -> dict[str, Score]:
    phases.phase("reading prompts")
    if options.initial_head is not None:
        # A head that does not fit is an error before any prompt is answered.
        read_initial_head(options, open_model(options.target.model).config)
    split = split_prompts(options)
    say(f"{len(split.trained)} prompts to train on, {split.held_out} held out, {split.left_out} left out for overlap")
    threads = options.target.threads or torch.get_num_threads()
    sets = _answers(options, split, world, say, phases)
    torch.set_num_threads(threads)  # the engine that answered has left torch one
    run = _prepare(options, split, sets, world, say, phases)
    trainer = _trainer(run)
    if trainer.progress.finished:
        say("training had already ended; measuring")
    else:
        trainer.run()
    return _finish(run, trainer) if world.first else {}


def _answers(options: TrainOptions, split: Split, world: World, say: Say, phases: Phases) -> dict[str, list[Exchange]]:
    """Answer what is not answered yet, and return the exchanges of each set."""
    place, settings = options.work / "answers", options.answer_settings
    if world.first:
        AnswerStore.create(place, settings, split.questions)
    world.wait()
    store = AnswerStore.create(place, settings, split.questions)
    phases.phase("answering prompts", unit="prompts", total=len(split.questions))
    answer(store, Workers.of(options.target, part=world.rank, parts=world.size), phases)
    world.wait()
    sets = store.read()
    tokens = sum(exchange.answer for exchange in sets[TRAIN])
    say(f"{len(sets[TRAIN])} answers with {tokens} tokens to learn from")
    for name, exchanges in sets.items():
        if not exchanges:
            raise InvalidRequest(
                f"no prompt of the set {name!r} got an answer: raise --max-length ({options.target.max_length})"
            )
    return sets


def _prepare(
    options: TrainOptions, split: Split, sets: dict[str, list[Exchange]], world: World, say: Say, phases: Phases
) -> TrainRun:
    """Load the target and create the student."""
    phases.phase("loading the target")
    model = load_target(options.target, world.device)
    phases.phase("reading hidden states")
    start = new_student(options, model, sets[TRAIN], device=world.device)
    if start.vocabulary is not None:
        tokens, coverage = len(start.vocabulary.ids), start.vocabulary.coverage
        say(f"draft vocabulary: {tokens} tokens, {coverage:.2%} of the answers")
    return TrainRun(options, world, say, phases, split, sets, start, Progress(settings=_settings(options, world)))


def _settings(options: TrainOptions, world: World) -> dict[str, object]:
    """Options that must not change when a training resumes, by the names that checkpoints have for them."""
    shape: tuple[str, ...] = ("kind", "draft_vocab", "unroll", "intermediate", "heads", "hidden", "layers", "packing")
    if options.kind == "block":
        shape += ("block", "taps", "markov")
    course = ("aim", "batch_tokens", "learning_rate", "max_steps", "seed")
    return {name: getattr(options, name) for name in shape + course} | {
        "serving": options.target.serving,
        "begin": options.initial_head,
        "processes": world.size,
    }


def _trainer(run: TrainRun) -> Trainer:
    """Create the trainer, and restore the checkpoint if there is one."""
    path = run.options.work / "checkpoint.safetensors"
    groups: dict[str, dict[str, torch.Tensor]] = {}
    if path.exists():
        run.progress, groups = checkpoint.load(path, run.progress.settings)
        run.say(f"going on from step {run.progress.step}, {run.progress.seconds / 60:.1f} minutes of training")
    trainer = Trainer(
        student=run.start.student,
        teacher=run.start.teacher,
        train=run.sets[TRAIN],
        held_out=run.sets[HELD_OUT],
        schedule=_schedule(run.options),
        aim=run.options.aim,
        score_first=run.start.origin is not None,
        world=run.world,
        path=path,
        progress=run.progress,
        phases=run.phases,
        on_report=run.on_report,
        on_score=run.on_score,
    )
    if groups:
        _load_weights(run.start.student, groups["param"], groups["constant"])
        trainer.best = {name: tensor.to(run.world.device) for name, tensor in groups["best"].items()}
        trainer.optimiser.load_state(groups)
    return trainer


def _schedule(options: TrainOptions) -> Schedule:
    return Schedule(
        minutes=options.minutes,
        max_steps=options.max_steps,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        seed=options.seed,
        evaluations=options.evaluations,
        draft=options.draft,
    )


@torch.no_grad()
def _load_weights(student: Student, params: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in student.params.items():
        tensor.copy_(params[name])
    for name, tensor in student.constants.items():
        tensor.copy_(constants[name])


def _finish(run: TrainRun, trainer: Trainer) -> dict[str, Score]:
    """Measure the best weights on every set, and write the drafter with its card."""
    student, teacher, device = run.start.student, run.start.teacher, run.world.device
    if trainer.best:
        _load_weights(student, trainer.best, student.constants)
    tokens = run.options.batch_tokens
    run.phases.phase("fitting the shortlist")
    some = in_order(run.sets[TRAIN][:SKETCH_EXCHANGES], tokens=tokens)
    student.finish(teacher, (texts.to(device) for texts in some))
    sets = {name: exchanges for name, exchanges in run.sets.items() if name != TRAIN}
    run.phases.phase("measuring", unit="sets", total=len(sets))
    scores = measure_sets(student, teacher, sets, draft=run.options.draft, tokens=tokens, device=device, say=run.say)
    run.phases.phase(f"writing {run.options.out}")
    run.write(scores)
    run.say(f"written: {run.options.out}")
    return scores


def _device_name(world: World) -> str:
    if world.device.type == "cpu":
        return "a CPU"
    count = f"{world.size} × " if world.size > 1 else ""
    return f"{count}{torch.cuda.get_device_name(world.device)}"
