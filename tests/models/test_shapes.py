"""Named shapes are those their authors published; random weights fill any shape and keep activations sane."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ModelFileError, UnknownOption
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.models.shapes import SHAPES, is_shape, random_weights, shape_config
from paceline.models.tensor_names import expected_shapes
from paceline.runner.forwards.torch import TorchForward
from tests.models.tiny import COMMON, PAGES, run

PARAMETERS = {  # as their authors count them
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-32b": 32_762_123_264,
    "qwen3-1.7b": 1_720_574_976,
    "smollm2-135m": 134_515_008,
}


def small(**changes: Any) -> ModelConfig:
    config = replace(
        SHAPES["qwen3-1.7b"],
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_context=128,
        eos_ids=(),
        bos_id=None,
    )
    return replace(config, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    config = shape_config(name).checked(name)
    assert sum(map(prod, expected_shapes(config).values())) == PARAMETERS[name]


def test_a_shape_is_the_one_of_its_model() -> None:
    real = open_model("smollm2").config
    assert replace(SHAPES["smollm2-135m"], norm_eps=real.norm_eps, eos_ids=real.eos_ids) == real
    assert SHAPES["smollm2-135m"].norm_eps == pytest.approx(real.norm_eps)


def test_a_shape_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(COMMON | {"architectures": ["Qwen3ForCausalLM"]}))
    config = shape_config(str(path))
    assert (config.architecture, config.hidden_size, config.qk_norm) == ("qwen3", 64, True)


def test_what_is_no_shape() -> None:
    assert is_shape("qwen3-32b")
    assert is_shape("here/config.json")
    assert not is_shape("smollm2")
    with pytest.raises(UnknownOption, match=r"did you mean 'llama-3\.1-8b'"):
        shape_config("llama-3.1-7b")
    with pytest.raises(ModelFileError, match="missing"):
        shape_config("/nowhere/config.json")


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "post_norms": True, "tied_head": False}])
def test_random_weights_are_all_that_is_expected(changes: dict[str, Any]) -> None:
    config = small(num_layers=2, **changes)
    weights = dict(random_weights(config, dtype=torch.bfloat16))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected_shapes(config)
    assert all(weight.dtype == (torch.bfloat16 if weight.dim() == 2 else torch.float32) for weight in weights.values())
    assert torch.equal(weights["layers.1.q_norm"], torch.ones(16))
    again, other = dict(random_weights(config, dtype=torch.bfloat16)), dict(random_weights(config, seed=1))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["embed"].float(), other["embed"])


def test_activations_stay_sane_through_64_layers() -> None:
    config = small(num_layers=64)
    forward = TorchForward(config, dict(random_weights(config)), num_pages=PAGES)
    logits = run(forward, list(range(20)), (20,))
    assert 0.3 < float(logits.std()) < 3
    assert len(set(logits.argmax(dim=-1).tolist())) > 3
