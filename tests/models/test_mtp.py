"""What is no MTP head, what of it does not fit, and the names of tensors in forms that do not run here yet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import InvalidRequest, ModelFileError, PacelineError, UnsupportedModel, VocabularyMismatch
from paceline.models.config import ModelConfig
from paceline.models.fields import Fields
from paceline.models.head_tensors import HeadTensors
from paceline.models.load import load_model, open_model
from paceline.models.mtp import check_mtp, has_mtp, load_mtp
from paceline.models.mtp_forms import OTHERS, form_of, refuse_others
from tests.mtp_checkpoints import COUNT, LAYOUTS

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def changed(folder: Path, change: Change) -> Path:
    """Edit the config and the tensors of a directory."""
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(values, tensors)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_of(folder: Path) -> ModelConfig:
    return open_model(str(folder)).config


def say(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def layer(**values: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(values)


def put(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda config, tensors: tensors.update({name: torch.ones(size, dtype=dtype)})


def drop(beginning: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(beginning)]:
            del tensors[name]

    return change


def without(key: str) -> Change:
    return lambda config, tensors: config.pop(key)


def narrow(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A head with a draft vocabulary, one id of which is outside of the target's."""
    config["draft_vocab_size"] = 3
    tensors |= {"lm_head.weight": torch.ones(3, 64), "d2t": torch.tensor([0, 5, 300])}


ALONE: dict[str, tuple[Change, type[PacelineError], str]] = {
    "a tensor too few": (
        drop("mtp_layers.0.token_layernorm"),
        ModelFileError,
        r"tensor 'mtp_layers.0.token_layernorm.weight' \[64\] is missing",
    ),
    "a tensor of its layer too few": (
        drop("mtp_layers.0.mlp.up_proj"),
        ModelFileError,
        r"tensor 'mtp_layers.0.mlp.up_proj.weight' \[96, 64\] is missing",
    ),
    "a tensor too many": (put("mtp_layers.0.gate.weight", 4, 4), ModelFileError, "1 tensor that no head .*0.gate"),
    "a stray tensor": (
        put("other.weight", 4, 4),
        ModelFileError,
        "1 tensor that no head of this kind has: other.weight; a file without it would fit$",
    ),
    "a tensor of another shape": (
        put("mtp_layers.0.input_proj.weight", 64, 64),
        ModelFileError,
        r"'mtp_layers.0.input_proj.weight' is \[64, 64\]; .* it must be \[64, 128\]",
    ),
    "integers": (
        put("mtp_layers.0.input_proj.weight", 64, 128, dtype=torch.int32),
        ModelFileError,
        ": mtp_layers.0.input_proj.weight holds torch.int32; floats are needed",
    ),
    "another hidden size": (layer(hidden_size=32), InvalidRequest, "a head for hidden states of size 32, the target"),
    "another vocabulary": (layer(vocab_size=300), VocabularyMismatch, "a head for a vocabulary of 300, the target's"),
    "no count": (
        without(COUNT),
        ModelFileError,
        f"{COUNT} is missing, but there are tensors mtp_layers.*: set it to 1",
    ),
    "a count of none": (say(**{COUNT: 0}), ModelFileError, rf"{COUNT} is 0, but the tensors .* of modules \[0\]"),
    "a count of two": (say(**{COUNT: 2}), ModelFileError, rf"{COUNT} is 2, but the tensors .* of modules \[0\]"),
    "a count that is none": (say(**{COUNT: "one"}), ModelFileError, f"{COUNT} is 'one'; allowed: a whole number"),
    "no tensors": (drop("mtp_layers"), ModelFileError, f"{COUNT} is 1, but there are no tensors .*: fetch all files"),
    "nothing of it": (
        lambda config, tensors: (drop("mtp_layers")(config, tensors), config.pop(COUNT))[0],
        UnsupportedModel,
        r"no MTP head: no tensors model.mtp_layers.\*, mtp_layers.\*, mtp.\*",
    ),
    "a copy that is none": (
        put("lm_head.weight", 7, 64),
        ModelFileError,
        r"'lm_head.weight' is \[7, 64\]; as a copy of the target's it must be \[259, 64\]",
    ),
    "ids of another length": (
        lambda config, tensors: (narrow(config, tensors), put("d2t", 4)(config, tensors))[0],
        ModelFileError,
        r"'d2t' is \[4\]; .* it must be \[3\]",
    ),
    "no ids": (
        lambda config, tensors: (narrow(config, tensors), drop("d2t")(config, tensors))[0],
        ModelFileError,
        "d2t is missing: which 3 of 259 tokens are drafted",
    ),
    "an id out of range": (narrow, ModelFileError, "d2t leads to token 302, outside of the vocabulary of 259"),
    "a family that is not known": (
        lambda config, tensors: (
            drop("mtp_layers")(config, tensors),
            config.pop("speculators_model_type"),
            say(model_type="ernie4_5_moe")(config, tensors),
        )[0],
        UnsupportedModel,
        f"{COUNT} is 1, and MTP heads of model_type 'ernie4_5_moe' are not read; those of MiMo, speculators mtp",
    ),
    "a layer of Gemma 3": (layer(model_type="gemma3_text"), UnsupportedModel, "an MTP layer of gemma3, with norms"),
    "a layer of Qwen3-Next": (
        layer(model_type="qwen3_next"),
        UnsupportedModel,
        "an MTP head of the form 'Qwen3-Next' needs a mixture of experts",
    ),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("blank", [False, True])
def test_a_head_that_does_not_fit(name: str, blank: bool, tmp_path: Path) -> None:
    change, error, message = ALONE[name]
    target, head = LAYOUTS["alone for Llama"].write(tmp_path)
    changed(head, change)
    if blank and name == "an id out of range":
        return  # ids are data, and only headers are read
    with pytest.raises(error, match=message):
        load_mtp(head, target_of(target), blank=blank)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    target, head = LAYOUTS["alone for Llama"].write(tmp_path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin is a pickle, which can run code when it is read"):
        load_mtp(head, target_of(target))


def test_several_layers_in_a_stitched_head_are_refused(tmp_path: Path) -> None:
    target, _ = LAYOUTS["stitched into Qwen3"].write(tmp_path)
    changed(target, say(**{COUNT: 2}))
    changed(target, put("mtp.layers.1.mlp.up_proj.weight", 96, 64))
    with pytest.raises(UnsupportedModel, match=r"2 layers in tensors mtp.\*; one is supported"):
        check_mtp(target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_target_is_loaded_without_its_head(name: str, tmp_path: Path) -> None:
    target, head = LAYOUTS[name].write(tmp_path)
    assert has_mtp(target) == (target == head)
    model = load_model(str(target))
    assert model.config.architecture == {"mimo": "qwen2"}.get(LAYOUTS[name].family, LAYOUTS[name].family)
    assert not any("mtp" in weight for weight in model.weights)


def test_a_head_is_read_without_its_data(tmp_path: Path) -> None:
    target, _ = LAYOUTS["MiMo"].write(tmp_path)
    whole, blank = (load_mtp(target, target_of(target), blank=blank) for blank in (False, True))
    assert {name: tuple(weight.shape) for name, weight in whole.weights.items()} == {
        name: tuple(weight.shape) for name, weight in blank.weights.items()
    }
    assert all(weight.is_meta for weight in blank.weights.values())
    assert whole.config == blank.config
    assert (whole.config.taps, whole.config.norm_output, whole.config.decoder.num_layers) == ((2,), True, 1)


# ── forms of architectures that do not run here yet ──

PUBLISHED = {  # names of one checkpoint each, and what they mean
    "DeepSeek V3": {
        "model.layers.61.enorm.weight": "embed_norm.weight",
        "model.layers.61.hnorm.weight": "state_norm.weight",
        "model.layers.61.eh_proj.weight": "fc.weight",
        "model.layers.61.shared_head.norm.weight": "norm.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
        "model.layers.61.embed_tokens.weight": "embed_tokens.weight",
        "model.layers.61.self_attn.kv_a_proj_with_mqa.weight": "layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.61.mlp.experts.7.up_proj.weight": "layers.0.mlp.experts.7.up_proj.weight",
    },
    "GLM-4.5": {
        "model.layers.61.eh_proj.weight": "fc.weight",
        "model.layers.61.self_attn.q_proj.bias": "layers.0.self_attn.q_proj.bias",
    },
    "Qwen3-Next": {
        "mtp.fc.weight": "fc.weight",
        "mtp.pre_fc_norm_embedding.weight": "embed_norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "state_norm.weight",
        "mtp.norm.weight": "norm.weight",
        "mtp.layers.0.self_attn.q_norm.weight": "layers.0.self_attn.q_norm.weight",
    },
    "Qwen3.5": {
        "mtp.fc.weight": "fc.weight",
        "mtp.layers.0.input_layernorm.weight": "layers.0.input_layernorm.weight",
    },
    "Gemma 4 assistant": {
        "pre_projection.weight": "fc.weight",
        "post_projection.weight": "carry.weight",
        "model.layers.3.self_attn.q_norm.weight": "layers.3.self_attn.q_norm.weight",
        "model.norm.weight": "norm.weight",
        "model.embed_tokens.weight": "embed_tokens.weight",
    },
    "MiniMax-M3": {
        "model.mtp.layers.0.enorm.weight": "embed_norm.weight",
        "model.mtp.layers.0.hnorm.weight": "state_norm.weight",
        "model.mtp.layers.0.eh_proj.weight": "fc.weight",
        "model.mtp.layers.0.final_layernorm.weight": "norm.weight",
        "model.mtp.layers.0.transformer_layer.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
        "model.mtp.layers.0.transformer_layer.block_sparse_moe.experts.7.w1.weight": (
            "layers.0.block_sparse_moe.experts.7.w1.weight"
        ),
    },
}


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.family)
def test_names_of_tensors_are_known_before_their_networks_run(form: Any, tmp_path: Path) -> None:
    names = PUBLISHED[form.family]
    save_file({name: torch.ones(2) for name in ["lm_head.0", *names]}, tmp_path / "model.safetensors")
    file = HeadTensors(tmp_path, prefixes={}).part(form.tensors.format(layers=61), form.prefixes(61))
    assert {*file.names()} - {"lm_head.0"} == {*names.values()}
    for published, name in names.items():
        assert file._files[name] == published


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.family)
def test_they_are_refused_by_name(form: Any) -> None:
    for kind in form.model_types:
        for values in ({"model_type": kind}, {"text_config": {"model_type": kind}}):
            with pytest.raises(
                UnsupportedModel, match=re.escape(f"form '{form.family}' needs {form.lacks}, which")
            ) as raised:
                refuse_others(Fields(values, source="config.json"))
            assert "it runs those of MiMo, speculators mtp" in str(raised.value)


def test_a_count_that_only_one_family_has_is_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="form 'MiniMax-M3'"):
        refuse_others(Fields({"num_mtp_modules": 3}, source="config.json"))
    with pytest.raises(UnsupportedModel, match="form 'MiniMax-M3'"):
        refuse_others(Fields({"text_config": {"num_mtp_modules": 1}}, source="config.json"))
    refuse_others(Fields({"model_type": "qwen3", COUNT: 1}, source="config.json"))


def test_a_checkpoint_without_mtp_has_no_form() -> None:
    assert form_of(["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]) is None
