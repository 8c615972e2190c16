"""Configs of EAGLE heads: what each published key means, and what is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafters.shipped import SHIPPED
from paceline.errors import InvalidRequest, ModelFileError, PacelineError, UnsupportedModel
from paceline.kernels.quant import values_of
from paceline.models.eagle_config import EagleConfig, eagle_config
from paceline.models.heads import load_eagle
from paceline.models.shapes import SMOLLM2_135M
from tests.published_heads import EAGLE3, IDS, LAYOUTS, NESTED, SHAPE, SPECULATORS
from tests.tiny_models import TARGET

SMALL = {**SHAPE, **EAGLE3, "vocab_size": 97, IDS: [0, 1, 2]}
DEEP = replace(TARGET.config, num_layers=24)


def read(target: Any = TARGET.config, **values: Any) -> EagleConfig:
    return eagle_config({**SMALL, **values}, target, source="config.json")


def speculators(**values: Any) -> EagleConfig:
    inner = {**SHAPE, "vocab_size": 97}
    return eagle_config({**SPECULATORS, NESTED: inner, **values}, TARGET.config, source="config.json")


def test_ids_at_the_top_level_name_inputs_of_layers() -> None:
    assert read(DEEP, **{IDS: [2, 12, 21]}).taps == (2, 12, 21)


def test_ids_of_eagle_config_name_outputs_of_layers() -> None:
    assert read(DEEP, **{IDS: None, "eagle_config": {IDS: [1, 11, 21]}}).taps == (2, 12, 22)
    assert read(DEEP, **{IDS: None, "eagle_config": {IDS: [-1, 23]}}).taps == (0, 25)


def test_the_output_of_the_last_layer_is_the_tap_before_the_last_norm() -> None:
    assert read(DEEP, **{IDS: [0, 24]}).taps == (0, 25)


def test_both_conventions_may_agree_and_must_not_differ() -> None:
    assert read(DEEP, **{IDS: [2, 12], "eagle_config": {IDS: [1, 11]}}).taps == (2, 12)
    with pytest.raises(ModelFileError, match=rf"{IDS} is \[2, 12\], but eagle_config names .* \[3, 13\]"):
        read(DEEP, **{IDS: [2, 12], "eagle_config": {IDS: [2, 12]}})


def test_a_head_that_paceline_wrote_keeps_its_taps() -> None:
    """Paceline used to write taps into eagle_config, and ships such a head."""
    values = json.loads((SHIPPED / "smollm2" / "config.json").read_text(encoding="utf-8"))
    assert eagle_config(values, SMOLLM2_135M, source="config.json").taps == (2, 15, 27)
    values["eagle_config"] = {**values["eagle_config"], "use_aux_hidden_state": True}
    assert eagle_config(values, SMOLLM2_135M, source="config.json").taps == (3, 16, 28)


def test_no_ids_are_the_usual_ones() -> None:
    assert read(DEEP, **{IDS: None}).taps == (2, 12, 21)
    with pytest.raises(ModelFileError, match=rf"{IDS} is missing, and the usual \[2, 1, -1\] do not fit .* 2 layers"):
        read(**{IDS: None})


def test_a_norm_before_the_residual_depends_on_the_format() -> None:
    assert speculators().norm_first
    assert not speculators(norm_before_residual=False).norm_first
    assert not read().norm_first
    assert read(norm_before_residual=True).norm_first


@pytest.mark.parametrize("inner", [False, True])
def test_flags_stand_at_the_top_level_or_in_eagle_config(inner: bool) -> None:
    flags = {"norm_output": True, "fc_norm": True}
    config = read(**({"eagle_config": flags} if inner else flags))
    assert config.norm_output
    assert config.feature_norms == 3
    assert config.flags == ("fc_norm", "norm_output")


def test_windows_of_layers() -> None:
    types = ["sliding_attention", "full_attention"]
    config = read(num_hidden_layers=2, layer_types=types, sliding_window=512)
    assert config.decoder.windows == (512, 0)
    assert config.flags == ("2 layers", "a window of 512")
    assert read(layer_types=["full_attention"]).decoder.windows == ()


def test_windows_as_qwen3_says_them() -> None:
    said = {"use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 2}
    assert read(**said, max_window_layers=1).decoder.windows == (0, 512)
    assert read(**said, max_window_layers=0).flags == ("2 layers", "a window of 512")
    assert read(**{**said, "use_sliding_window": False}, max_window_layers=0).decoder.windows == ()
    assert read(**said, max_window_layers=0, layer_types=["full_attention"] * 2).decoder.windows == ()
    inner = {**SHAPE, "vocab_size": 97, **said, "max_window_layers": 1}
    assert speculators(**{NESTED: inner}).decoder.windows == (0, 512)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"])
def test_a_head_of_qwen3_has_norms_of_queries_and_keys(name: str, tmp_path: Path) -> None:
    assert read(architectures=[name]).decoder.qk_norm
    layout = replace(LAYOUTS["eagle3"], values={**LAYOUTS["eagle3"].values, "architectures": [name]})
    with pytest.raises(ModelFileError, match=r"tensor 'midlayer.self_attn.q_norm.weight' \[16\] is missing"):
        load_eagle(layout.write(tmp_path / "without", vocab=97), TARGET.config)
    normed = replace(layout, shape={"model_type": "qwen3"})
    assert "layers.0.q_norm" in load_eagle(normed.write(tmp_path / "with", vocab=97), TARGET.config).weights


# ── speculators_config ──

METHOD = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}


def published(**said: Any) -> tuple[str, ...]:
    return speculators(speculators_config=said).notes


def test_what_its_publisher_says_of_its_use() -> None:
    assert published(algorithm="eagle3") == ()
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    assert published(verifier=verifier, proposal_methods=[METHOD]) == (
        "trained for Qwen/Qwen3-8B (qwen3; this target is llama)",
        "published for drafts of 3",
    )
    for same in (["LlamaForCausalLM"], ["NeverHeardOf"], []):
        assert published(verifier={"name_or_path": "a", "architectures": same}) == ("trained for a",)
    assert published(verifier={}, proposal_methods=[]) == ()
    other = {**METHOD, "proposal_type": "sample", "speculative_tokens": 5}
    assert published(proposal_methods=[METHOD, other], default_proposal_method="sample") == (
        "published for drafts of 5",
    )
    [_, lossy] = published(proposal_methods=[{**METHOD, "accept_tolerance": 0.1, "verifier_accept_k": 2}])
    assert lossy == "its rule of acceptance (verifier_accept_k 2, accept_tolerance 0.1) is not used"


def test_an_algorithm_is_that_of_the_type_or_of_its_backbone() -> None:
    def algorithm(name: str, kind: str, **more: Any) -> None:
        inner = {**SHAPE, "vocab_size": 97}
        config = {
            **SPECULATORS,
            NESTED: inner,
            "speculators_model_type": kind,
            "speculators_config": {"algorithm": name},
        }
        eagle_config({**config, **more}, TARGET.config, source="config.json")

    algorithm("EAGLE-3", "eagle3")
    algorithm("eagle3", "peagle", mask_token_id=1)
    with pytest.raises(ModelFileError, match="algorithm is 'dflash', but speculators_model_type is 'eagle3'; keep"):
        algorithm("dflash", "eagle3")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"proposal_methods": "greedy"}, "proposal_methods is 'greedy'; allowed: a list of mappings"),
        ({"proposal_methods": [{}]}, r"proposal_methods\[0\]: speculative_tokens is missing"),
        ({"proposal_methods": [{**METHOD, "speculative_tokens": 0}]}, "speculative_tokens is 0; allowed: a whole"),
        (
            {"proposal_methods": [METHOD], "default_proposal_method": "sample"},
            r"default_proposal_method is 'sample', but proposal_methods has \['greedy'\]",
        ),
        ({"verifier": "Qwen"}, "verifier is 'Qwen'; allowed: a mapping"),
        ({"verifier": {"architectures": "Qwen"}}, "architectures is 'Qwen'; allowed: a list"),
    ],
)
def test_a_speculators_config_that_cannot_be(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        published(**said)


@pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id", "pard_token"])
def test_the_token_of_drafted_positions(key: str) -> None:
    config = read(parallel_drafting=True, **{key: 5})
    assert (config.kind, config.mask_token) == ("P-EAGLE", 5)


REFUSED: dict[str, tuple[dict[str, Any], type[PacelineError], str]] = {
    "more taps than layers": ({IDS: [0, 1, 2, 2]}, ModelFileError, f"{IDS} has 4 layers; allowed: 1 to 3"),
    "no taps": ({IDS: []}, ModelFileError, f"{IDS} has 0 layers"),
    "an id beyond": ({IDS: [3]}, ModelFileError, rf"{IDS} is \[3\]; allowed: layers of the target, from 0 to 2"),
    "an output beyond": (
        {IDS: None, "eagle_config": {IDS: [2]}},
        ModelFileError,
        rf"eagle_config: {IDS} is \[2\]; allowed: layers of the target, from -1 to 1",
    ),
    "no list": ({IDS: "2"}, ModelFileError, f"{IDS} is '2'"),
    "two norms": ({"norm_before_fc": True, "fc_norm": True}, ModelFileError, "norm_before_fc and fc_norm are both"),
    "no mask": ({"parallel_drafting": True}, ModelFileError, "mask_token_id is missing; needed: .* from 0 to 96"),
    "a mask beyond": (
        {"parallel_drafting": True, "pard_token": 97},
        ModelFileError,
        "pard_token is 97; allowed: a whole number from 0 to 96",
    ),
    "another layer": ({"layer_types": ["linear_attention"]}, ModelFileError, "layer_types is .*allowed: 1 of sliding_"),
    "types of two": ({"layer_types": ["full_attention"] * 2}, ModelFileError, "layer_types is .*allowed: 1 of"),
    "no window": ({"layer_types": ["sliding_attention"]}, ModelFileError, "sliding_window is missing"),
    "a flag": ({"norm_output": 1}, ModelFileError, "norm_output is 1; allowed: true or false"),
    "hidden": (
        {"target_hidden_size": 48},
        InvalidRequest,
        r"hidden states of size 48, the target's have 64; .* \(hidden_size or target_hidden_size 64\)",
    ),
    "speculators": ({"speculators_model_type": "mlp"}, UnsupportedModel, "'mlp' is no EAGLE head; supported: "),
}
EAGLE1 = {"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None}
REFUSED |= {
    f"EAGLE-1 {key}": ({**EAGLE1, key: True}, UnsupportedModel, f"an EAGLE-1 head with {key}")
    for key in ("layernorms", "norm_output", "fc_norm")
}
REFUSED["EAGLE-1 hidden"] = (
    {**EAGLE1, "hidden_size": 32, "target_hidden_size": 64},
    InvalidRequest,
    "a head for hidden states of size 32, the target's have 64",
)
REFUSED["EAGLE-1 in parallel"] = (
    {**EAGLE1, "parallel_drafting": True},
    UnsupportedModel,
    "a head of EAGLE-1 with parallel_drafting true",
)
REFUSED["P-EAGLE in sequence"] = (
    {"architectures": ["PEagleDraftModel"], "parallel_drafting": False, "mask_token_id": 1},
    UnsupportedModel,
    "a head of P-EAGLE with parallel_drafting false",
)
REFUSED["a flag with two values"] = (
    {"norm_output": True, "eagle_config": {"norm_output": False}},
    ModelFileError,
    "norm_output is True, but eagle_config.norm_output is False; keep the right one",
)
REFUSED["a size with two values"] = (
    {"hidden_size": 48, NESTED: {**SHAPE, "vocab_size": 97}},
    ModelFileError,
    "hidden_size is 48, but transformer_layer_config.hidden_size is 64",
)
REFUSED["EAGLE-1 vocabulary"] = ({**EAGLE1, "truncated_vocab_size": 50}, UnsupportedModel, "truncated_vocab_size cuts")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    values, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        read(**values)


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, *size: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(size)})


BROKEN: dict[str, tuple[str, Any, str]] = {
    "a norm": ("eagle3.1", drop("fc_norm.1.weight"), r"tensor 'fc_norm.1.weight' \[64\] is missing"),
    "another norm": (
        "eagle3",
        put("fc_norm.0.weight", 64),
        "1 tensor that no head of this kind has: fc_norm.0.weight; .* or a config.json with fc_norm true$",
    ),
    "one norm more": ("eagle3.1", put("fc_norm.3.weight", 64), "fc_norm.3.weight; a file without it would fit$"),
    "a stray mask": ("eagle3", put("mask_hidden", 1, 1, 192), "or a config.json with parallel_drafting true$"),
    "a layer": (
        "speculators, three layers",
        drop("layers.2.mlp.up_proj.weight"),
        r"tensor 'layers.2.mlp.up_proj.weight' \[96, 64\] is missing",
    ),
    "one more layer": (
        "speculators",
        put("layers.1.mlp.up_proj.weight", 96, 64),
        "layers.1.mlp.up_proj.weight; .* or a config.json with a larger num_hidden_layers$",
    ),
    "integers": (
        "eagle3",
        lambda tensors: tensors.update({"midlayer.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.int32)}),
        ": midlayer.mlp.up_proj.weight holds torch.int32; floats are needed",
    ),
    "q norm": (
        "speculators, qwen3",
        drop("layers.0.self_attn.q_norm.weight"),
        r"tensor 'layers.0.self_attn.q_norm.weight' \[16\] is missing",
    ),
    "bias": (
        "eagle3, biases and a window",
        drop("midlayer.self_attn.v_proj.bias"),
        r"tensor 'midlayer.self_attn.v_proj.bias' \[32\] is missing",
    ),
    "mask": ("p-eagle", put("mask_hidden", 1, 1, 64), r"'mask_hidden' is \[1, 1, 64\]; .* must be \[1, 1, 192\]"),
    "no mask": ("p-eagle", drop("mask_hidden"), r"tensor 'mask_hidden' \[1, 1, 192\] is missing"),
    "output": ("eagle3", drop("lm_head.weight"), r"lm_head.weight \[60, 64\] is missing, and the target's has 97"),
    "fc": ("eagle1, vllm", put("fc.weight", 64, 192), r"'fc.weight' is \[64, 192\]; .* must be \[64, 128\]"),
    "hidden": ("eagle3", put("fc.weight", 48, 192), r"'fc.weight' is \[48, 192\]; .* must be \[64, 192\]"),
    "map of another length": (
        "eagle3",
        lambda tensors: tensors.update(d2t=torch.zeros(61, dtype=torch.int64)),
        r"tensor 'd2t' is \[61\]; .* it must be \[60\]",
    ),
    "no map": ("eagle3", drop("d2t"), "d2t is missing: which 60 of 97 tokens"),
    "marks of another length": (
        "eagle3",
        lambda tensors: tensors.update(t2d=torch.zeros(60, dtype=torch.bool)),
        r"tensor 't2d' is \[60\]; .* it must be \[97\]",
    ),
    "map": ("eagle3", lambda tensors: tensors.update(d2t=torch.full((60,), 50)), "d2t leads to token 97, outside"),
}


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit_are_named(
    case: str, blank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From headers alone, but for values."""
    name, change, message = BROKEN[case]
    if blank and case == "map":
        return
    layout = LAYOUTS[name]
    made = type(layout).tensors

    def broken(self: Any, *args: Any) -> Any:
        tensors = made(self, *args)
        change(tensors)
        return tensors

    monkeypatch.setattr(type(layout), "tensors", broken)
    with pytest.raises(ModelFileError, match=message):
        load_eagle(layout.write(tmp_path, vocab=97), TARGET.config, blank=blank)


def test_a_pickle_is_refused_in_words(tmp_path: Path) -> None:
    folder = LAYOUTS["eagle1"].write(tmp_path, vocab=97)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin is a pickle, .* convert it to model.safetensors"):
        load_eagle(folder, TARGET.config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_without_data_has_the_same_shapes(name: str, tmp_path: Path) -> None:
    folder = LAYOUTS[name].write(tmp_path, vocab=97)
    blank, whole = load_eagle(folder, TARGET.config, blank=True), load_eagle(folder, TARGET.config)
    assert blank.config == whole.config
    shapes = [{key: values_of(weight).shape for key, weight in head.weights.items()} for head in (blank, whole)]
    assert shapes[0] == shapes[1]
    assert [*blank.weights] == [*whole.weights]
