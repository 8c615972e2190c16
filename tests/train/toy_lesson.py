"""A toy target as a teacher, texts for it, and heads that begin from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.models.load import LoadedModel
from paceline.train.batches import Texts
from paceline.train.beginnings import eagle_shape, new_eagle
from paceline.train.eagle import EagleHead
from paceline.train.teacher import Teacher
from tests.rig import Model

TARGET = Model(seed=5)


def teacher_for(*, layers: tuple[int, ...], model: Model = TARGET) -> Teacher:
    weights = {name: weight.clone() for name, weight in model.weights.items()}
    loaded = LoadedModel("hf", Path("toy"), model.config, dict(weights), metadata={}, generation={})
    return Teacher(loaded, layers=layers, dtype=torch.float32, device=torch.device("cpu"))


def texts_of(*, lengths: Sequence[int], starts: Sequence[int], vocab: int = 97) -> Texts:
    random = torch.Generator().manual_seed(sum(lengths))
    longest = -(-max(lengths) // 16) * 16
    ids = torch.randint(0, vocab, (len(lengths), longest), generator=random)
    return Texts(ids=ids, starts=torch.tensor(starts), ends=torch.tensor(lengths))


def head_for(teacher: Teacher, *, draft_vocab: int, steps: int, layers: tuple[int, ...] = (0, 1, 1)) -> EagleHead:
    config = teacher.config
    shape = eagle_shape(config, layers=layers, draft_vocab=draft_vocab, intermediate=96, steps=steps)
    ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
    scale = torch.rand(len(layers) * config.hidden_size, generator=torch.Generator().manual_seed(2)) + 0.5
    return new_eagle(shape, teacher, draft_ids=ids, scale=scale, dtype=torch.float32, seed=0, packing="bf16")
