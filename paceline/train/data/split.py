"""The prompts of a training, split into evaluation sets, held-out prompts and prompts to train on.

Prompts that overlap with an evaluation set or an excluded text are not trained on. The choice of held-out prompts
depends on the prompts alone, not on the seed. So a second training that starts from the head of the first is judged by
prompts that neither has seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import InvalidRequest
from paceline.prompts.files import Prompt, read_file
from paceline.train.data.answers import HELD_OUT, TRAIN, Question
from paceline.train.data.overlap import separate
from paceline.train.options import HELD_OUT_PROMPTS, TrainOptions
from paceline.train.seeds import HELD_OUT_STREAM, TEMPERATURE_STREAM, seeded_generator


@dataclass(frozen=True, slots=True)
class Split:
    questions: list[Question]  # evaluation sets, then held-out prompts, then prompts to train on in random order
    trained: list[Prompt]  # prompts to train on, each once
    left_out: int  # prompts that overlap with an evaluation set or an excluded text

    @property
    def held_out(self) -> int:
        """Number of prompts that the trainer evaluates on."""
        return sum(question.set == HELD_OUT for question in self.questions)

    @property
    def sampled(self) -> float:
        """Share of training answers that are sampled; the others are greedy."""
        temperatures = [question.temperature for question in self.questions if question.set == TRAIN]
        return sum(map(bool, temperatures)) / len(temperatures)

    @property
    def sources(self) -> list[tuple[str, str, int]]:
        """Source, licence and number of training prompts, most frequent first."""
        counts = Counter((prompt.source, prompt.license) for prompt in self.trained)
        return [(source, license, count) for (source, license), count in counts.most_common()]


def split_prompts(options: TrainOptions) -> Split:
    held_out, train, left_out = _held_out_and_train(options)
    questions = [Question(name, prompt.text) for name, path in options.evals.items() for prompt in read_prompts(path)]
    questions += [Question(HELD_OUT, prompt.text) for prompt in held_out]
    questions += _training_questions(options, train)
    return Split(questions, trained=train, left_out=left_out)


def _held_out_and_train(options: TrainOptions) -> tuple[list[Prompt], list[Prompt], int]:
    """Return held-out prompts, prompts to train on, and the number of prompts left out for overlap."""
    excluded = [text for path in (*options.excludes, *options.evals.values()) for text in read_texts(path)]
    prompts = read_prompts(options.prompts)
    clean, overlapping = separate([prompt.text for prompt in prompts], excluded)
    order = [clean[i] for i in torch.randperm(len(clean), generator=seeded_generator(0, HELD_OUT_STREAM)).tolist()]
    order = order[: options.max_prompts]
    held_out = max(1, min(HELD_OUT_PROMPTS, len(order) // 4)) if options.held_out is None else options.held_out
    if len(order) < held_out + 1:
        raise InvalidRequest(
            f"{options.prompts}: {len(order)} prompts can be used ({len(overlapping)} overlap with a set to measure "
            f"on), and {held_out} of them would be held out: give more prompts, or a smaller --held-out"
        )
    chosen = [prompts[i] for i in order]
    return chosen[:held_out], chosen[held_out:], len(overlapping)


def _training_questions(options: TrainOptions, train: list[Prompt]) -> list[Question]:
    """Make the questions to train on. First answers are sampled with probability `sampled`, further answers always."""
    draws = torch.rand(len(train), generator=seeded_generator(options.seed, TEMPERATURE_STREAM)).tolist()
    temperatures = [options.temperature if draw < options.sampled else 0.0 for draw in draws]
    first = [Question(TRAIN, prompt.text, temperature) for prompt, temperature in zip(train, temperatures, strict=True)]
    return first + [Question(TRAIN, prompt.text, options.temperature) for prompt in train] * (options.samples - 1)


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts that are a single user message. Any other prompt cannot be given to the target as it was meant."""
    prompts = read_file(path)
    for prompt in prompts:
        if len(prompt.messages) != 1:
            found = "the tokens of a recorded request" if prompt.tokens else "messages before the user's"
            raise InvalidRequest(f"{prompt.where}: holds {found}; give the user's text alone, or remove the line")
    return prompts


def read_texts(path: Path) -> list[str]:
    """Read every user turn of a set, later turns of its conversations included."""
    return [text for prompt in read_prompts(path) for text in (prompt.text, *prompt.later)]
