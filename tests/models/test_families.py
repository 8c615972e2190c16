"""Every family against transformers: the same files give the same logits, in one pass or in many."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import FAMILIES, load_eager, run

TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(40,), (17, 16, 7), (20,) + (1,) * 20], ids=["whole", "chunks", "decode"])
def test_logits_equal_those_of_transformers(family, sizes, tiny):
    model, path = tiny(family)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(run(load_eager(path), TOKENS, sizes), expected, rtol=1e-4, atol=1e-4)
