from __future__ import annotations

import pytest
import torch

from paceline.train.students.packing import PACKINGS, as_written, packed, unpacked


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_comes_back_close(packing: str) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(4, 64, generator=random) * torch.logspace(-4, 0, 64),
        "lm_head.weight": torch.randn(8, 64, generator=random),
        "norm.weight": torch.rand(64, generator=random),
    }
    file = packed(tensors, packing)
    assert file["lm_head.weight"].dtype == {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[packing]
    assert file["fc.weight"].dtype == torch.bfloat16
    back = unpacked(file)
    assert back.keys() == tensors.keys()
    assert torch.equal(back["norm.weight"], tensors["norm.weight"])
    assert torch.allclose(back["fc.weight"], tensors["fc.weight"], rtol=0.005)
    atol = 0.3 if packing == "int4" else 0.02
    assert torch.allclose(back["lm_head.weight"], tensors["lm_head.weight"], atol=atol)


def test_who_is_written_in_4_bits_learns_in_them() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    other = torch.randn(2, 96, generator=torch.Generator().manual_seed(1))
    written = as_written({"lm_head.weight": weight, "other": other}, "int4")["lm_head.weight"]
    file = unpacked(packed({"lm_head.weight": weight.detach()}, "int4"))
    assert torch.allclose(written, file["lm_head.weight"], atol=1e-6)
    (written * torch.arange(64)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(64).float().expand(4, 64))
    assert as_written({"fc.weight": weight}, "int4")["fc.weight"] is weight
    assert as_written({"lm_head.weight": weight}, "int8")["lm_head.weight"] is weight
