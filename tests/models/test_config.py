"""Variants of config.json: old and new spellings, defaults, and features that are refused."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelError, ModelFileError, UnsupportedModel
from paceline.models.config import RopeScaling
from paceline.models.directory import read_json
from paceline.models.hf_config import config_from_hf
from paceline.models.load import load_model, open_model
from paceline.models.rope import layer_rope, rope_frequencies, rope_tables

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(values):
    return config_from_hf(values, source="config.json")


def test_defaults_of_llama():
    config = parse(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 16, 10_000.0, 1e-6)
    assert (config.windows, config.rope_scaling, config.tied_head, config.eos_ids) == ((), None, False, ())


def test_old_and_new_spelling_of_rope_are_one():
    old = parse(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = parse(LLAMA | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    assert old == new
    assert old.rope_scaling == RopeScaling(kind="llama3", factor=32.0, original_context=64)
    ancient = {**LLAMA3, "type": "llama3"}
    ancient.pop("rope_type")
    assert parse(LLAMA | {"rope_theta": 5e5, "rope_scaling": ancient}) == old


def test_old_and_new_spelling_of_gemma_are_one():
    old = parse(GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6})
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert parse(GEMMA | {"rope_parameters": nested, "layer_types": types}) == old
    assert old.windows == (16, 16, 16, 16, 16, 0, 16)
    assert layer_rope(old, 0) == (1e4, None)
    assert layer_rope(old, 5) == (1e6, None)
    assert (old.embedding_scale, old.attention_scale, old.activation) == (8.0, 32**-0.5, "gelu_tanh")
    assert old.tied_head
    assert old.post_norms


def test_windows_of_qwen_are_off_unless_asked_for():
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 1}
    assert parse(qwen).windows == ()
    assert parse(qwen | {"use_sliding_window": True}).windows == (0, 32)


def test_windows_of_mistral():
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert parse(mistral | {"sliding_window": 32}).windows == (32, 32)
    assert parse(mistral | {"sliding_window": None}).windows == ()
    assert parse(mistral).windows == (4096, 4096)


def test_the_model_type_speaks_where_architectures_are_silent():
    values = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert parse(values | {"model_type": "qwen3"}).qk_norm


REFUSED = {
    "no architecture": ({"architectures": None}, "supported: llama"),
    "an unknown architecture": ({"architectures": ["MambaForCausalLM"]}, "Mamba.*supported: llama"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "supported"),
    "a picture model": ({"architectures": ["Gemma3ForConditionalGeneration"]}, "supported"),
    "architectures of another type": ({"architectures": {"a": 1}, "model_type": [3]}, "supported"),
    "another activation": ({"hidden_act": "relu"}, "relu"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    "soft-capping": ({"final_logit_softcapping": 30.0}, "soft-capping"),
    "quantised elsewhere": ({"quantization_config": {"quant_method": "gptq"}}, "quantised for another engine"),
    "experts": ({"num_local_experts": 8}, "experts"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "part"),
    "chunked layers": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["x"] * 2,
        },
        "layer_types",
    ),
    "layers of another type": ({"architectures": ["Gemma3ForCausalLM"], "layer_types": [{}, []]}, "layer_types"),
    "mixed layers": (
        {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
        "mixes",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_decoder_lacks_is_refused(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        parse(LLAMA | change)


WRONG = {
    "missing": ({"hidden_size": None}, "hidden_size is missing"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "negative": ({"vocab_size": -5}, "vocab_size is -5"),
    "a fraction": ({"hidden_size": 64.5}, "64.5"),
    "a truth": ({"hidden_size": True}, "True"),
    "a text": ({"intermediate_size": "128"}, "'128'"),
    "huge": ({"num_hidden_layers": 10**9}, "1000000000"),
    "NaN": ({"rms_norm_eps": float("nan")}, "nan"),
    "infinite": ({"rope_theta": float("inf")}, "inf"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "multiple of 3"),
    "odd heads": ({"head_dim": 15}, "odd"),
    "more heads than width": ({"num_attention_heads": 128}, "odd"),
    "rope of another type": ({"rope_scaling": [1]}, "mapping"),
    "half a llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "llama3 upside down": ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "not above"),
    "an end outside": ({"eos_token_id": 100}, "outside of the vocabulary"),
    "ends of another type": ({"eos_token_id": ["a"]}, "token id"),
    "too few layer types": (
        {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "layer_types": ["full_attention"]},
        "windows of 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_numbers_are_named(change, message):
    with pytest.raises(ModelFileError, match=message):
        parse(LLAMA | change)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"a": "\\ud800'])
def test_broken_json_is_a_model_file_error(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_model(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(LLAMA3)), inner, max_size=5),
    max_leaves=9,
)
KEYS = sorted({*GEMMA, "rope_scaling", "rope_theta", "rope_parameters", "layer_types", "eos_token_id", "rms_norm_eps"})


CHANGES = st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(base=st.sampled_from([LLAMA, GEMMA]), change=CHANGES)
def test_any_config_is_refused_or_makes_sense(base, change):
    with contextlib.suppress(ModelError):
        config = parse(base | change)
        assert config.num_heads % config.num_kv_heads == 0
        assert rope_frequencies(config.head_dim, *layer_rope(config, 0)).isfinite().all()


def test_json_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.models.directory.MAX_JSON", 10)
    (tmp_path / "config.json").write_text('{"a": "aaaaaaaaaa"}')
    with pytest.raises(ModelFileError, match="more than 10 bytes"):
        read_json(tmp_path / "config.json")


def test_generation_defaults(tiny, tmp_path):
    model, _ = tiny("llama2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6, "top_p": None, "max_length": 20}))
    opened = open_model(str(tmp_path))
    assert opened.generation.values == {"temperature": 0.6}
    assert opened.config.eos_ids == (7, 9)
    for spoilt in ({"temperature": "hot"}, {"eos_token_id": 96}, {"top_p": float("nan")}):
        path.write_text(json.dumps(spoilt))
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            open_model(str(tmp_path))


def test_tables_are_the_frequencies_times_the_positions():
    config = parse(LLAMA | {"rope_theta": 100.0})
    cos, sin = rope_tables(config, *layer_rope(config, 0), 5)
    assert cos.shape == sin.shape == (5, 8)
    angles = torch.outer(torch.arange(5.0), 100.0 ** -(torch.arange(8) / 8))
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
    plain = rope_frequencies(64, 5e5, None)
    scaled = rope_frequencies(64, 5e5, RopeScaling(kind="llama3", factor=8.0))
    assert torch.equal(scaled[:10], plain[:10])
    assert torch.equal(scaled[-5:], plain[-5:] / 8)
    assert bool((scaled <= plain).all())
