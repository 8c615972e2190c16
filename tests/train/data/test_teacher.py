"""The teacher sees what the engine's target computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from paceline.kernels.base import Batch
from paceline.kernels.quant import GROUP, Quantised, Weight, dequantise, quantise
from paceline.models.load import LoadedModel
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.lanes import Lanes
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import Teacher
from tests.tiny_models import Model
from tests.train.toy_training import teacher_for, texts_of


@pytest.mark.parametrize("window", [0, 8])
def test_logits_are_those_of_the_engine(window: int) -> None:
    model = Model(seed=5, window=window)
    texts = texts_of(lengths=(20, 32), starts=(4, 4))
    teacher = teacher_for(layers=(0, 1, 1), model=model)
    states = teacher(texts.ids)
    for row, length in enumerate((20, 32)):
        forward = TorchForward(model.config, model.weights, num_pages=4)
        expected = one_pass(forward, texts.ids[row, :length].tolist())
        found = states.hidden[row, :length] @ teacher.head.T
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_target_in_few_bits_teaches_what_it_computes_in_them() -> None:
    model = Model(seed=5)
    texts = texts_of(lengths=(20,), starts=(4,))
    few = {name: quantise(w, group=GROUP) if w.dim() == 2 else w for name, w in model.weights.items()}
    whole = {name: dequantise(w) if isinstance(w, Quantised) else w for name, w in few.items()}
    forward = TorchForward(model.config, few, num_pages=4, taps=(1,))
    served = forward(batch_of(texts.ids[0, :20].tolist())).features
    rounded, exact = (_features(model, weights, texts)[:20] for weights in (few, whole))
    assert (rounded - served).abs().max() < (exact - served).abs().max() / 10


def _features(model: Model, weights: Mapping[str, Weight], texts: TextBatch) -> torch.Tensor:
    """What enters the second layer of the first text."""
    there = LoadedModel("hf", Path("toy"), model.config, dict(weights), metadata={})
    return Teacher(there, layers=(1,), dtype=torch.float32, device=torch.device("cpu"))(texts.ids).features[0]


def one_pass(forward: TorchForward, tokens: list[int]) -> torch.Tensor:
    return forward(batch_of(tokens)).logits.clone()


def batch_of(tokens: list[int]) -> Batch:
    lanes = Lanes(count=1, max_context=64, max_draft=1)
    lane = lanes.take()
    lanes.tokens_np[lane, : len(tokens)] = tokens
    lanes.pages_np[lane, :4] = range(4)
    return build_batch(lanes, [Share(lane=lane, start=0, count=len(tokens), outs=len(tokens))])


def test_features_are_what_enters_the_layers() -> None:
    teacher = teacher_for(layers=(0, 1, 1))
    texts = texts_of(lengths=(16,), starts=(4,))
    features = teacher(texts.ids).features
    first, second, third = features.chunk(3, dim=-1)
    assert torch.equal(first, teacher.embed(texts.ids))
    assert torch.equal(second, third)
    assert not torch.allclose(first, second)


def test_nobody_who_wants_no_features_gets_any() -> None:
    texts = texts_of(lengths=(16,), starts=(4,))
    assert teacher_for(layers=())(texts.ids).features.shape == (1, 16, 0)
