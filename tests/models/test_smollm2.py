"""The real model: Paceline's decoder against the one of transformers, on real prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.kernels.quant import Quantised, dequantise
from paceline.models.load import LoadedModel, load_model
from paceline.runner.forwards.torch import TorchForward
from paceline.text.tokenizer import Tokenizer
from tests.models.tiny import chunks_of

PROMPTS = [
    "The three primary colours are red,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nHow long is it from 9:40 to 11:05?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2", format="fp32")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(model.metadata)
    return [tokenizer.encode(prompt, special=True) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def theirs(model: LoadedModel) -> Any:
    """Transformers' own Llama with the weights of the file (its own GGUF reader takes 20 seconds)."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which only this needs

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        built = LlamaForCausalLM(config)
    state = {name: model.weights[canonical] for name in built.state_dict() if (canonical := canonical_name(name))}
    built.load_state_dict(state, strict=False, assign=True)
    built.tie_weights()
    built.model.rotary_emb = type(built.model.rotary_emb)(config)
    assert not any(parameter.is_meta for parameter in built.parameters())
    return built.eval()


def canonical_name(name: str) -> str | None:
    name = name.removeprefix("model.").removesuffix(".weight").removesuffix("_proj")
    if name == "lm_head":
        return None  # tied
    for theirs, ours in (("self_attn.", ""), ("mlp.", ""), ("embed_tokens", "embed"), ("input_layernorm", "attn_norm")):
        name = name.replace(theirs, ours)
    return name.replace("post_attention_layernorm", "mlp_norm")


def test_logits_equal_those_of_transformers(model, theirs, prompts):
    forward = TorchForward(model.config, model.weights, num_pages=8)
    for tokens in prompts:
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits[0]
        got = torch.cat([forward(batch).logits for batch in chunks_of(tokens, (5, len(tokens) - 5))])
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_native_weights_are_the_file_s_own(model, prompts):
    native = load_model("smollm2").weights
    quantised = {name: weight for name, weight in native.items() if isinstance(weight, Quantised)}
    assert len(quantised) == 30 * 7 + 1
    assert {weight.bits for name, weight in quantised.items() if name != "embed"} == {4}
    for name in ("embed", "layers.0.q", "layers.29.k", "layers.7.down"):
        torch.testing.assert_close(dequantise(quantised[name]), model.weights[name], rtol=0, atol=1e-6)
