"""The same tests twice: by Triton's interpreter on the CPU, and compiled where PACELINE_GPU is set."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

ON_GPU = "PACELINE_GPU" in os.environ


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[torch.float32, *([torch.bfloat16] if ON_GPU else [])], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of activations and KV memory. The interpreter cannot multiply bf16."""
    assert isinstance(request.param, torch.dtype)
    return request.param
