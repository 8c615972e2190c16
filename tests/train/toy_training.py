"""A toy target as a teacher or as a directory, texts and prompts for it, and heads that start from it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.models.load import LoadedModel
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import Teacher
from paceline.train.options import TargetOptions, TrainOptions
from paceline.train.students.eagle import EagleStudent
from paceline.train.students.initial_weights import eagle_shape, new_eagle
from tests.cli.tiny_model import write_model
from tests.tiny_models import Model

TARGET = Model(seed=5)
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "likes",
    "big",
    "small",
    "red",
    "runs",
    "to",
    "home",
    "of",
    "tree",
    "and",
    "or",
]
LETTERS = range(100, 116)  # what the toy target says


def write_target(path: Path) -> Path:
    """A random model that uses few letters and depends most on the last ones: there is something to learn."""
    path.mkdir(parents=True)
    weights = load_file(write_model(path) / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = weight * 0.3
        if "lm_head" in name:
            weights[name] = torch.zeros_like(weight)
            weights[name][list(LETTERS)] = weight[list(LETTERS)] * 2
    save_file(weights, path / "model.safetensors")
    return path


def write_prompts(path: Path, *, count: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    texts = [" ".join(draw.choice(WORDS) for _ in range(4)) for _ in range(count)]
    lines = [json.dumps({"prompt": text, "source": "toy", "license": "CC0-1.0"}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def toy_options(
    target: Path, prompts: Path, out: Path, *, max_length: int = 128, max_new: int = 40, **changes: object
) -> TrainOptions:
    there = TargetOptions(str(target), max_length=max_length, max_new=max_new, answer_batch=16, threads=1)
    settings: dict[str, object] = {
        "kind": "eagle",
        "held_out": 12,
        "draft_vocab": 40,
        "batch_tokens": 1024,
        "max_steps": 50,
        "learning_rate": 1e-2,
        "unroll": 2,
        "sampled": 0.7,
        "temperature": 1.0,
        "evaluations": 3,
    }
    return TrainOptions(target=there, prompts=prompts, out=out, **settings | changes)


def teacher_for(*, layers: tuple[int, ...], model: Model = TARGET) -> Teacher:
    return Teacher(loaded(model), layers=layers, dtype=torch.float32, device=torch.device("cpu"))


def loaded(model: Model = TARGET) -> LoadedModel:
    weights = {name: weight.clone() for name, weight in model.weights.items()}
    return LoadedModel("hf", Path("toy"), model.config, dict(weights), metadata={})


def texts_of(*, lengths: Sequence[int], starts: Sequence[int], vocab: int = 97) -> TextBatch:
    draw = torch.Generator().manual_seed(sum(lengths))
    longest = -(-max(lengths) // 16) * 16
    ids = torch.randint(0, vocab, (len(lengths), longest), generator=draw)
    return TextBatch(ids=ids, starts=torch.tensor(starts), ends=torch.tensor(lengths))


def head_for(teacher: Teacher, *, draft_vocab: int, steps: int, layers: tuple[int, ...] = (0, 1, 1)) -> EagleStudent:
    config = teacher.config
    shape = eagle_shape(config, layers=layers, draft_vocab=draft_vocab, intermediate=96, steps=steps)
    ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
    scale = torch.rand(len(layers) * config.hidden_size, generator=torch.Generator().manual_seed(2)) + 0.5
    return new_eagle(shape, teacher, draft_ids=ids, scale=scale, dtype=torch.float32, seed=0, packing="bf16")
