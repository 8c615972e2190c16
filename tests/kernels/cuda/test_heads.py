"""Hidden states of the decoder of launches, and drafters that read them beside it, with the host in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.runner.forwards.torch import TorchForward
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.test_laws import requests
from tests.kernels.tiny_forward import rows_of
from tests.rig import RIGS, build
from tests.runs import plain, run, tokens_of
from tests.tiny_models import TARGET, cuda_forward

TAPS = (0, 1, 2)


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


@pytest.mark.parametrize("kind", ["eagle", "medusa"] if ON_GPU else ["eagle"])
def test_same_text_whoever_drafts(kind: str) -> None:
    """Steps run on the host, because no device drafts with heads."""
    asked = requests("sampled")[: None if ON_GPU else 1]
    rig = build("cuda", {kind: RIGS[kind][kind]}, on_device={})
    rig.engine._admission.default_drafter = kind
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(run(build("cuda", on_device={}), plain(asked)))
    assert rig.engine.drafters[kind].out is None
    assert rig.engine.stats.drafted > 0
