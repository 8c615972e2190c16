"""Measurements of a drafter: tokens per round on evaluation sets, replayed over the target's greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paceline.train.data.answering import Workers, answer
from paceline.train.data.answers import AnswerStore, Exchange, Question
from paceline.train.data.split import read_prompts
from paceline.train.data.teacher import Teacher, load_target
from paceline.train.loop.score import Score, evaluate
from paceline.train.options import EvalOptions
from paceline.train.phases import Phases, Unseen
from paceline.train.students.kinds import read_student
from paceline.train.students.student import Student

Say = Callable[[str], None]


def measure(options: EvalOptions, say: Say, phases: Phases | None = None) -> dict[str, Score]:
    """Measure a trained drafter on each evaluation set. The answers are kept in a temporary directory."""
    phases = phases or Unseen()
    device = torch.device(options.target.device)
    questions = [Question(name, one.text) for name, path in options.evals.items() for one in read_prompts(path)]
    with TemporaryDirectory() as folder:
        store = AnswerStore.create(Path(folder) / "answers", options.target.answer_settings(), questions)
        phases.phase("answering prompts", unit="prompts", total=len(questions))
        answer(store, Workers.of(options.target), phases)
        sets = store.read()
    phases.phase("measuring")
    student, teacher = read_student(options.drafter, load_target(options.target, device), device=device)
    return measure_sets(
        student, teacher, sets, draft=options.draft, tokens=options.batch_tokens, device=device, say=say
    )


def measure_sets(
    student: Student,
    teacher: Teacher,
    sets: Mapping[str, list[Exchange]],
    *,
    draft: int,
    tokens: int,
    device: torch.device,
    say: Say,
) -> dict[str, Score]:
    """Measure a student on sets of exchanges, in batches of at most `tokens`, and say each score."""
    scores = {}
    for name, exchanges in sets.items():
        score = evaluate(student, teacher, exchanges, draft=draft, tokens=tokens, device=device)
        scores[name] = score
        shares = " ".join(f"{share:.3f}" for share in score.by_position)
        say(
            f"{name}: {score.tokens_per_round:.3f} tokens per round over {len(exchanges)} prompts, by position {shares}"
        )
    return scores
