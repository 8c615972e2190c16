"""Every family against transformers: the same files give the same logits, in one pass or in many."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline.models.load import load_model
from tests.models.tiny import FAMILIES, build_tiny, load_eager, run
from tests.models.tiny_gguf import write_gguf

TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
GGUF_FAMILIES = [family for family in FAMILIES if family != "qwen2-window"]  # GGUF has no metadata for it


def logits_of(model):
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    assert logits.std() > 0.1
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(40,), (17, 16, 7), (20,) + (1,) * 20], ids=["whole", "chunks", "decode"])
def test_logits_equal_those_of_transformers(family, sizes, tiny):
    model, path = tiny(family)
    torch.testing.assert_close(run(load_eager(path), TOKENS, sizes), logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, Kind.F32) for family in GGUF_FAMILIES]
    + [("llama3", kind) for kind in (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1)]
    + [("gemma3", Kind.Q4_1), ("qwen2", Kind.Q8_0)],
)
def test_gguf_logits_equal_those_of_transformers(family, kind, tmp_path):
    model, path = build_tiny(family), tmp_path / "tiny.gguf"
    write_gguf(model, path, kind=kind)
    forward = load_eager(path, format="fp32")
    torch.testing.assert_close(run(forward, TOKENS, (33, 7)), logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma3"])
@pytest.mark.parametrize("format", ["native", "int8", "int4"])
def test_quantised_formats_stay_near_fp32(family, format, tmp_path):
    write_gguf(build_tiny(family), tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    exact = run(load_eager(tmp_path, format="fp32"), TOKENS, (40,))
    rough = run(load_eager(tmp_path, format=format), TOKENS, (40,))
    assert 0 < (exact - rough).std() < (0.3 if format == "int4" else 0.05) * exact.std()


def test_ends_of_a_gguf_are_named_and_known_ones(tmp_path):
    write_gguf(build_tiny("llama2"), tmp_path / "tiny.gguf")
    config = load_model(str(tmp_path)).config
    assert config.eos_ids == (2, 95)
    assert config.bos_id == 1


@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3"])
def test_bf16_stays_near_fp32(family, tiny):
    _, path = tiny(family)
    exact, rough = run(load_eager(path), TOKENS, (40,)), run(load_eager(path, format="bf16"), TOKENS, (40,))
    assert 0 < (exact - rough).abs().max() < 0.1 * exact.std()
