from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.cuda.norm import add_norm, finish_norm, norm
from paceline.kernels.reference import rms_norm
from tests.kernels.cuda.conftest import ON_GPU

HIDDEN = 100


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def close(out: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(out.float(), wanted.float(), rtol=1e-2 if out.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = random(3, HIDDEN, device=device, dtype=dtype), random(HIDDEN, device=device, seed=1)
    out = torch.full_like(x, torch.nan)
    norm(x, weight, out, eps=1e-5, pdl=ON_GPU)
    assert close(out, rms_norm(x, weight, 1e-5))


def test_a_normed_branch(device: torch.device, dtype: torch.dtype) -> None:
    x, branch = (random(3, HIDDEN, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    post, weight = (random(HIDDEN, device=device, seed=seed) for seed in (2, 3))
    wanted, out = x + rms_norm(branch, post, 1e-5), torch.full_like(x, torch.nan)
    add_norm(x, branch, post, weight, out, eps=1e-5, pdl=ON_GPU)
    assert close(x, wanted)
    assert close(out, rms_norm(wanted, weight, 1e-5))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("biased", [True, False])
def test_the_end_of_a_product_and_a_norm(parts: int, biased: bool, device: torch.device, dtype: torch.dtype) -> None:
    """finish_norm gives the bits of a sum of parts followed by norm."""
    sums, bias = random(parts, 3, HIDDEN, device=device, seed=1), random(HIDDEN, device=device, seed=2)
    x, weight = random(3, HIDDEN, device=device, dtype=dtype), random(HIDDEN, device=device, seed=3)
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in sums:
        total += part
    wanted = ((total + bias if biased else total).to(dtype).float() + x.float()).to(dtype)
    normed, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    norm(wanted, weight, normed, eps=1e-5, pdl=ON_GPU)
    finish_norm(sums, bias if biased else None, x, weight, out, eps=1e-5, pdl=ON_GPU)
    assert torch.equal(x, wanted)
    assert torch.equal(out, normed)
