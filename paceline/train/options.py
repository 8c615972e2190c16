"""What a user asks of `paceline train`, and the questions that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.errors import InvalidRequest
from paceline.models.weights import Format
from paceline.prompts.files import Prompt
from paceline.train.data.answers import HELD_OUT, TRAIN, AnswerSettings, Question
from paceline.train.data.labels import Aim
from paceline.train.data.overlap import split
from paceline.train.data.prompts import read_prompts, read_texts
from paceline.train.output.packing import Packing
from paceline.train.output.storage import same_seed

DRAFT_VOCAB = 16384  # tokens that a new EAGLE head knows


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a training is made of. Paths are the user's; nothing outside of `out` and `work` is written."""

    kind: str
    target: str
    prompts: Path
    out: Path
    evals: Mapping[str, Path] = field(default_factory=dict)  # sets to measure on, never trained on
    excludes: Sequence[Path] = ()  # more texts whose like must not be trained on
    license: str = "other"
    device: str = "cpu"
    format: Format = "auto"  # of the target while it answers
    serving: Format | None = None  # of the target as the drafter will meet it; None: in whole floats
    threads: int | None = None
    max_prompts: int | None = None
    held_out: int = 256
    max_length: int = 1024
    max_new: int = 320
    samples: int = 1  # answers to each prompt
    sampled: float = 0.3  # share of first answers that are drawn; further ones all are
    temperature: float = 0.8
    answer_batch: int = 256
    answer_workers: int = 1
    begin: str | None = None  # an EAGLE head to go on with: a directory, a hub id, or one that is shipped
    draft_vocab: int | None = None  # None: DRAFT_VOCAB, or that of `begin`
    unroll: int = 5
    intermediate: int | None = None  # None: the target's, that of `begin`, or what suits `hidden`
    heads: int = 4  # of Medusa
    hidden: int = 192  # of a small model, as is the next
    layers: int = 4
    aim: Aim = "likelihood"
    batch_tokens: int = 16384
    learning_rate: float = 4e-3
    minutes: float = 15.0
    max_steps: int | None = None
    evaluations: int = 24
    draft: int = 4  # tokens of a draft, when it is measured
    seed: int = 0
    packing: Packing = "bf16"
    command: str = ""

    @property
    def work(self) -> Path:
        """Answers and checkpoints; may be removed once the drafter is there."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def answers(self) -> AnswerSettings:
        return AnswerSettings(
            target=self.target,
            format="bf16" if self.format == "auto" and self.device == "cuda" else self.format,
            max_length=self.max_length,
            max_new=self.max_new,
            sampled=self.sampled,
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Curriculum:
    questions: list[Question]
    trained: list[Prompt]  # the prompts that are trained on
    left_out: int  # for they overlap with what is measured on

    @property
    def sampled(self) -> float:
        """Share of the answers to train on that are drawn."""
        temperatures = [question.temperature for question in self.questions if question.set == TRAIN]
        return sum(map(bool, temperatures)) / len(temperatures)


def curriculum(job: Job) -> Curriculum:
    """All questions: sets to measure on first, then held-out prompts, then those to train on in random order.

    Which are held out depends on the prompts alone: a training with another seed that begins with what this one has
    made is judged by prompts that neither has learnt from."""
    sets = {name: read_prompts(path) for name, path in job.evals.items()}
    excluded = [text for path in (*job.excludes, *job.evals.values()) for text in read_texts(path)]
    prompts = read_prompts(job.prompts)
    clean, shared = split([prompt.text for prompt in prompts], excluded)
    order = [clean[i] for i in torch.randperm(len(clean), generator=same_seed(0, 3)).tolist()]
    order = order[: job.max_prompts]
    if len(order) < job.held_out + 1:
        raise InvalidRequest(
            f"{job.prompts}: {len(order)} prompts can be used ({len(shared)} overlap with a set to measure on), and "
            f"{job.held_out} of them would be held out: give more prompts, or a smaller --held-out"
        )
    held_out, train = [prompts[i] for i in order[: job.held_out]], [prompts[i] for i in order[job.held_out :]]
    questions = [Question(name, prompt.text) for name, some in sets.items() for prompt in some]
    questions += [Question(HELD_OUT, prompt.text) for prompt in held_out]
    draws = torch.rand(len(train), generator=same_seed(job.seed, 4)).tolist()
    for prompt, draw in zip(train, draws, strict=True):
        questions.append(Question(TRAIN, prompt.text, job.temperature if draw < job.sampled else 0.0))
    questions += [Question(TRAIN, prompt.text, job.temperature) for prompt in train] * (job.samples - 1)
    return Curriculum(questions, trained=train, left_out=len(shared))
