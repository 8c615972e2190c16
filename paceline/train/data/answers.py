"""What the target answers to the prompts, in shards on disk: made once, read for every kind of drafter.

    plan.json        settings, and the sets with the number of prompts of each
    prompts.jsonl    every prompt in order, with its set and its temperature
    shard-00012.safetensors    prompts [12 * SHARD, 13 * SHARD) with their answers, there as a whole or not at all

A shard that is there is never written again, so a kill at any moment costs the shards that were being answered. Answers
that were made with other settings are refused, not mixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import InvalidRequest
from paceline.models.directory import read_json
from paceline.models.weights import Format
from paceline.train.output.storage import read_tensors, write_bytes, write_json, write_tensors

SHARD = 256  # prompts; some seconds of a GPU's work
TRAIN, HELD_OUT = "train", "held-out"


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Everything that decides what the answers are."""

    target: str
    format: Format
    max_length: int  # tokens of prompt and answer
    max_new: int  # tokens of an answer
    sampled: float  # share of training prompts whose answer is drawn, not the most likely
    temperature: float  # of those
    seed: int


@dataclass(frozen=True, slots=True)
class Question:
    set: str
    text: str
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its answer as tokens; the end token is part of the answer. No answer: the prompt was too long."""

    tokens: np.ndarray  # int32 [prompt + answer]
    prompt: int  # how many of them are the prompt's

    @property
    def answer(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True)
class AnswerStore:
    """A directory of answers, finished or not."""

    path: Path
    settings: AnswerSettings
    questions: Sequence[Question] = field(repr=False)

    @classmethod
    def create(cls, path: Path, settings: AnswerSettings, questions: Sequence[Question]) -> AnswerStore:
        """A new store, or the one that is there if it was made for exactly this."""
        lines = "".join(json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions).encode()
        plan = asdict(settings) | {"shard": SHARD, "prompts": hashlib.sha256(lines).hexdigest()}
        if (path / "plan.json").exists():
            _check_same(path, read_json(path / "plan.json"), plan)
        else:
            write_bytes(path / "prompts.jsonl", lines)
            write_json(path / "plan.json", plan)
        return cls(path, settings, questions)

    @classmethod
    def open(cls, path: Path) -> AnswerStore:
        plan = read_json(path / "plan.json")
        names = AnswerSettings.__dataclass_fields__
        with open(path / "prompts.jsonl", encoding="utf-8") as lines:
            questions = [Question(**json.loads(line)) for line in lines]
        return cls(path, AnswerSettings(**{name: plan[name] for name in names}), questions)

    @property
    def shards(self) -> int:
        return -(-len(self.questions) // SHARD)

    def shard_path(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05}.safetensors"

    def missing(self) -> list[int]:
        return [shard for shard in range(self.shards) if not self.shard_path(shard).exists()]

    def write(self, shard: int, exchanges: Sequence[Exchange]) -> None:
        tokens = [torch.from_numpy(exchange.tokens.astype(np.int32)) for exchange in exchanges]
        tensors = {
            "tokens": torch.cat(tokens),
            "lengths": torch.tensor([len(one.tokens) for one in exchanges], dtype=torch.int32),
            "prompts": torch.tensor([one.prompt for one in exchanges], dtype=torch.int32),
        }
        write_tensors(self.shard_path(shard), tensors)

    def read(self) -> dict[str, list[Exchange]]:
        """All that was answered, by set; prompts that were too long are left out."""
        sets: dict[str, list[Exchange]] = {question.set: [] for question in self.questions}
        for index, exchange in enumerate(self._exchanges()):
            if exchange.answer > 1:
                sets[self.questions[index].set].append(exchange)
        return sets

    def _exchanges(self) -> Iterator[Exchange]:
        for shard in range(self.shards):
            tensors, _ = read_tensors(self.shard_path(shard))
            tokens, lengths = tensors["tokens"].numpy(), tensors["lengths"].tolist()
            end = 0
            for length, prompt in zip(lengths, tensors["prompts"].tolist(), strict=True):
                yield Exchange(tokens[end : end + length], prompt)
                end += length


def _check_same(path: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if there.get(name) != value:
            raise InvalidRequest(
                f"{path}: holds answers that were made with {name} = {there.get(name)!r:.80}, not {value!r:.80}; "
                "give the same options again, or another --out"
            )
