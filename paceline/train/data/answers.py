"""The target's answers to the prompts, in shards on disk: made once, read for every kind of drafter.

    plan.json        settings, and a hash of the prompts
    prompts.jsonl    every prompt in order, with its set and its temperature
    shard-00012.safetensors    prompts [12 * SHARD_PROMPTS, 13 * SHARD_PROMPTS) with their answers

A shard is written once and as a whole, so a kill at any moment costs only the shards that were being answered.
Answers made with other settings are refused, not mixed.
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
from paceline.train.storage import read_tensors, write_bytes, write_json, write_tensors

SHARD_PROMPTS = 256  # prompts of a shard: a few seconds of work for a GPU
TRAIN, HELD_OUT = "train", "held-out"


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Everything that decides what the answers are."""

    target: str
    format: Format
    max_length: int  # tokens of prompt and answer together
    max_new: int  # tokens of an answer
    sampled: float  # share of training prompts whose answer is sampled instead of greedy
    temperature: float  # temperature of sampled answers
    seed: int


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to be answered, and the set it belongs to."""

    set: str
    text: str
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its answer as tokens, the end token included. A prompt that is too long has no answer."""

    tokens: np.ndarray  # int32 [prompt + answer]
    prompt: int  # tokens of the prompt

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True)
class AnswerStore:
    """A directory of answers, complete or not."""

    path: Path
    settings: AnswerSettings
    questions: Sequence[Question] = field(repr=False)

    @classmethod
    def create(cls, path: Path, settings: AnswerSettings, questions: Sequence[Question]) -> AnswerStore:
        """Create a store, or open the existing one if it has exactly these settings and questions."""
        lines = "".join(json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions).encode()
        plan = asdict(settings) | {"shard": SHARD_PROMPTS, "prompts": hashlib.sha256(lines).hexdigest()}
        if (path / "plan.json").exists():
            _check_same(path, read_json(path / "plan.json"), plan)
        else:
            write_bytes(path / "prompts.jsonl", lines)
            write_json(path / "plan.json", plan)
        return cls(path, settings, questions)

    @classmethod
    def open(cls, path: Path) -> AnswerStore:
        """Open an existing store."""
        plan = read_json(path / "plan.json")
        names = AnswerSettings.__dataclass_fields__
        with open(path / "prompts.jsonl", encoding="utf-8") as lines:
            questions = [Question(**json.loads(line)) for line in lines]
        return cls(path, AnswerSettings(**{name: plan[name] for name in names}), questions)

    @property
    def shards(self) -> int:
        """Number of shards of the complete store."""
        return -(-len(self.questions) // SHARD_PROMPTS)

    def shard_path(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05}.safetensors"

    def missing(self) -> list[int]:
        """List the shards that are not answered yet."""
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
        """Read all exchanges by set. Answers of fewer than two tokens are left out: nothing in them can be drafted."""
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
