"""Hidden states of the decoder of launches, and heads that read them inside of rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.torch import TorchHead
from tests.heads import random_eagle
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.test_laws import requests
from tests.kernels.tiny_forward import rows_of
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS
from tests.runs import plain, run, tokens_of
from tests.tiny_models import TARGET, cuda_forward, cuda_head

TAPS = (0, 1, 2, 3)
DRAFTING = ["eagle", "eagle-narrow", "eagle-hesitant", "eagle-flags", "eagle-parallel", "eagle-1", "mtp", "medusa"]
DRAFTING += ["block", "block-markov", "portfolio", "portfolio-by-seats", "portfolio-block"]
HEADS: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {"hidden": 32, "norm_first": True},
    "eagle-3.1": {"feature_norms": 3, "norm_output": True},
    "three layers": {"layers": 3, "qk_norm": True, "window": 3, "feature_norms": 1, "qkv_bias": True},
    "p-eagle": {"kind": "P-EAGLE", "mask_token": 5, "layers": 2, "feature_norms": 3},
    "eagle-1": {"kind": "EAGLE-1", "taps": (2,), "draft_vocab": None, "without": ("head",)},
    "mtp": {
        "kind": "MTP",
        "norm_output": True,
        "taps": (2,),
        "draft_vocab": None,
        "qk_norm": True,
        "without": ("head",),
    },
}


def test_hidden_states_are_those_of_plain_torch() -> None:
    batch = rows_of(([3 * i % 90 for i in range(9)], 0, 9, [0]))
    output = cuda_forward(TARGET, num_pages=4, taps=TAPS)(batch)
    wanted = TorchForward(TARGET.config, TARGET.weights, num_pages=4, taps=TAPS)(batch)
    assert output.features is not None
    assert wanted.features is not None
    assert output.features.shape == wanted.features.shape
    error = (output.features.cpu() - wanted.features).norm() / wanted.features.norm()
    assert error < (0.03 if ON_GPU else 1e-4)
    assert cuda_forward(TARGET, num_pages=4)(batch).features is None


@pytest.mark.parametrize("taps", [(), (0, 1), TAPS])
def test_states_after_the_last_norm_whatever_the_taps(taps: tuple[int, ...]) -> None:
    batch = replace(rows_of(([3 * i % 90 for i in range(9)], 0, 9, [0])), states=True)
    output = cuda_forward(TARGET, num_pages=4, taps=taps)(batch)
    wanted = TorchForward(TARGET.config, TARGET.weights, num_pages=4, taps=taps)(batch)
    assert output.states is not None
    assert wanted.states is not None
    error = (output.states.cpu() - wanted.states).norm() / wanted.states.norm()
    assert error < (0.03 if ON_GPU else 1e-4)
    assert (output.features is None) == (not taps)
    assert output.features is None or output.features.shape == (9, len(taps) * TARGET.config.hidden_size)


def test_embeddings() -> None:
    tokens = torch.tensor([0, 5, 96], dtype=torch.int32)
    got = cuda_forward(TARGET, num_pages=1).embed(tokens).float().cpu()
    assert torch.allclose(got, TARGET.weights["embed"][tokens.long()], atol=0.01)


@pytest.mark.parametrize("name", DRAFTING if ON_GPU else ["eagle", "block-markov", "portfolio"])
@pytest.mark.parametrize("law", ["greedy", "sampled"] if ON_GPU else ["sampled"])
def test_same_text_whoever_drafts(name: str, law: str) -> None:
    asked = requests(law)[: None if ON_GPU else 1]
    rig = build("cuda", on_device={name: DEVICE_RIGS[name]})
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(run(build("cuda", on_device={}), plain(asked)))
    assert rig.engine.stats.drafted > 0


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
def test_same_text_under_pressure() -> None:
    """Many chunks a prompt, few pages, and drafters that take turns."""
    asked = requests("sampled")
    by = {name: DEVICE_RIGS[name] for name in ("eagle", "noisy", "medusa")}
    for options in ({"max_step_tokens": 7}, {"num_pages": 14}, {"prefix_cache": False}):
        mixed = [
            replace(one, speculation=replace(one.speculation, drafter=[*by][i % 3])) for i, one in enumerate(asked)
        ]
        told = run(build("cuda", on_device=by, **options), mixed)
        assert tokens_of(told) == tokens_of(run(build("cuda", on_device={}), plain(asked)))


@pytest.mark.parametrize("name", HEADS)
def test_passes_as_those_of_plain_torch(name: str) -> None:
    """Two sequences of several rows, then two turns on the head's own output."""
    made = random_eagle(TARGET.config, **{"draft_vocab": 40, **HEADS[name]})
    target = cuda_forward(TARGET, num_pages=4)
    head = cuda_head(made, target)
    oracle = TorchHead(made, TorchForward(TARGET.config, TARGET.weights, num_pages=4), num_pages=4)
    batch = rows_of(([3, 9, 4, 1, 5], 0, 3, [0]), ([2, 7, 1, 8], 0, 2, [1]))
    features = torch.randn((5, made.config.width), generator=torch.Generator().manual_seed(3))
    rows = target._placed(batch)
    last = [2, 4]
    wanted = oracle(batch, features=features).logits[last]
    compare(head.first(rows, features.to(head.device, head.dtype)), wanted)
    for turn in (1, 2):
        batch = rows_of(([3, 9, 4, 1, 5], 2 + turn, 3 + turn, [0]), ([2, 7, 1, 8], 1 + turn, 2 + turn, [1]))
        wanted = oracle(batch, carry=last).logits
        compare(head.further(target._placed(batch), turn), wanted)
        last = [0, 1]


def compare(got: Tensor, wanted: Tensor) -> None:
    error = (got.float().cpu() - wanted).norm() / wanted.norm()
    assert error < (0.05 if ON_GPU else 1e-4)
