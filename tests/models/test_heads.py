"""Published heads: every layout that is read, and every head that is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import InvalidRequest, ModelFileError, PacelineError, UnsupportedModel, VocabularyMismatch
from paceline.kernels.quant import GROUP, Quantised, dequantise, pack_nibbles, quantise
from paceline.models.eagle_config import LAYER_IDS
from paceline.models.heads import EagleHead, load_eagle, load_medusa
from tests.heads import eagle_tensors, eagle_values, medusa_tensors, random_eagle, random_medusa, write_head
from tests.tiny_models import TARGET

CONFIG = TARGET.config
HEAD = random_eagle(CONFIG, draft_vocab=40)


def loaded(path: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
    return load_eagle(write_head(path / "head", values, tensors), CONFIG)


def assert_same(head: EagleHead, expected: EagleHead) -> None:
    assert head.config == expected.config
    assert head.ids.dtype == torch.int32
    assert torch.equal(head.ids, expected.ids)
    assert head.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(head.weights[name], weight), name


def test_as_published(tmp_path: Path) -> None:
    assert_same(loaded(tmp_path, eagle_values(HEAD), eagle_tensors(HEAD)), HEAD)


def test_with_a_sketch_of_its_last_layer(tmp_path: Path) -> None:
    hidden = CONFIG.hidden_size
    sketch = torch.randint(-127, 128, (32, hidden), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    tensors = {**eagle_tensors(HEAD), "lm_head.sketch": sketch}
    head = loaded(tmp_path, eagle_values(HEAD), tensors)
    assert_same(head, HEAD)
    for format in ("fp32", "int8"):
        kept = head.in_format(format).sketch
        assert kept is not None
        assert torch.equal(kept, sketch)
    for wrong in (sketch.float(), sketch[:31], sketch[:, 1:], sketch.repeat(hidden // 32 + 1, 1)):
        with pytest.raises(ModelFileError, match=r"lm_head\.sketch"):
            loaded(tmp_path, eagle_values(HEAD), {**tensors, "lm_head.sketch": wrong})


def test_of_another_size_than_the_target(tmp_path: Path) -> None:
    head = random_eagle(CONFIG, draft_vocab=40, hidden=32)
    assert_same(loaded(tmp_path, eagle_values(head), eagle_tensors(head)), head)


def test_of_the_speculators_library(tmp_path: Path) -> None:
    head = random_eagle(CONFIG, draft_vocab=40, norm_first=True)
    plain = eagle_values(head)
    top = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config")
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere/else"}},
        "draft_vocab_size": 40,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(head.config.taps),
        "transformer_layer_config": {key: value for key, value in plain.items() if key not in top},
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle_tensors(head).items()}
    assert_same(loaded(tmp_path, values, tensors), head)


def test_layers_are_chosen_where_none_are_named(tmp_path: Path) -> None:
    deep = replace(CONFIG, num_layers=30)
    values = eagle_values(HEAD) | {LAYER_IDS: None, "eagle_config": None}
    head = load_eagle(write_head(tmp_path, values, eagle_tensors(HEAD)), deep)
    assert head.config.taps == (2, 15, 27)


def in_four_bits(head: EagleHead) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in eagle_tensors(head).items():
        tensors[name] = tensor
        if tensor.dim() == 2 and name != "fc.weight":
            small = quantise(tensor, bits=4, group=GROUP)
            tensors[name] = pack_nibbles(small.q)
            tensors |= {f"{name}_scale": small.scale.half(), f"{name}_minimum": small.minimum.half()}
    return tensors


def test_in_four_bits_two_a_byte(tmp_path: Path) -> None:
    head = loaded(tmp_path, eagle_values(HEAD), in_four_bits(HEAD))
    small = HEAD.in_format("int4")
    for name, read in head.in_format("int4").weights.items():
        wanted = small.weights[name]
        if isinstance(wanted, Quantised):
            assert isinstance(read, Quantised)
            assert torch.equal(read.q, wanted.q)
            assert torch.equal(dequantise(read), dequantise(wanted))


def test_four_bits_must_be_whole(tmp_path: Path) -> None:
    tensors = in_four_bits(HEAD)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].char()
    with pytest.raises(ModelFileError, match=r"lm_head\.weight holds torch\.int8 for 64 inputs"):
        loaded(tmp_path, eagle_values(HEAD), tensors)
    tensors = in_four_bits(HEAD)
    tensors["lm_head.weight_minimum"][0, 0] = torch.inf
    with pytest.raises(ModelFileError, match=r"lm_head\.weight_minimum holds something that is no scale"):
        loaded(tmp_path, eagle_values(HEAD), tensors)


@pytest.mark.parametrize("group", [None, GROUP])
def test_in_eight_bits_with_scales(tmp_path: Path, group: int | None) -> None:
    tensors = {}
    for name, tensor in eagle_tensors(HEAD).items():
        tensors[name] = tensor
        if tensor.dim() == 2 and name != "fc.weight":
            small = quantise(tensor, group=group)
            tensors[name] = (small.q.to(torch.int16) - 128).to(torch.int8)
            tensors[f"{name}_scale"] = small.scale
    head = loaded(tmp_path, eagle_values(HEAD), tensors)
    for name, weight in HEAD.weights.items():
        read = head.weights[name]
        if isinstance(read, Quantised):
            assert isinstance(weight, Tensor)
            assert torch.equal(dequantise(read), dequantise(quantise(weight, group=group)))
            assert isinstance(head.in_format("int8").weights[name], Quantised)
        else:
            assert name == "fc" or read.dim() == 1


def test_a_head_without_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    head = random_eagle(CONFIG)
    tensors = {name: tensor for name, tensor in eagle_tensors(head).items() if name not in ("d2t", "t2d")}
    values = eagle_values(head)
    del values["draft_vocab_size"]
    assert loaded(tmp_path, values, tensors).ids.tolist() == list(range(CONFIG.vocab_size))


def drop(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensor

    return change


def say(**fields: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        values |= fields

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], None], type[PacelineError], str]] = {
    "no fc": (drop("fc.weight"), ModelFileError, r"tensor 'fc.weight' \[64, 192\] is missing"),
    "no d2t": (drop("d2t"), ModelFileError, "d2t is missing: which 40 of 97 tokens"),
    "more": (put("midlayer.bias", torch.ones(3)), ModelFileError, "no head of this kind has: midlayer.bias"),
    "twice": (put("layers.0.hidden_norm.weight", torch.ones(64)), ModelFileError, "names for the same thing"),
    "shape": (put("norm.weight", torch.ones(63)), ModelFileError, r"is \[63\]; by config.json .* must be \[64\]"),
    "far": (put("d2t", 2 * torch.arange(40)), ModelFileError, "d2t leads to token 99, outside of the vocabulary of 97"),
    "low": (put("d2t", torch.full((40,), -1)), ModelFileError, "d2t leads to token -1, outside"),
    "same": (put("d2t", -torch.arange(40)), ModelFileError, "d2t leads to the same token twice"),
    "t2d": (put("t2d", torch.zeros(97, dtype=torch.bool)), ModelFileError, "t2d and d2t speak of different tokens"),
    "floats": (put("d2t", torch.zeros(40)), ModelFileError, "d2t holds torch.float32; whole numbers"),
    "ints": (put("norm.weight", torch.ones(64).long()), ModelFileError, "norm.weight holds torch.int64; floats"),
    "scale": (put("lm_head.weight", torch.ones((40, 64)).char()), ModelFileError, "'lm_head.weight_scale'"),
    "layer": (
        say(**{LAYER_IDS: [0, 1, 3]}),
        ModelFileError,
        r"is \[0, 1, 3\]; allowed: layers of the target, from 0 to 2",
    ),
    "hidden": (say(target_hidden_size=32), InvalidRequest, "hidden states of size 32, the target's have 64"),
    "vocab": (say(vocab_size=96), VocabularyMismatch, r"a vocabulary of 96, the target's has 97; .* \(vocab_size 97\)"),
    "draft": (say(draft_vocab_size=98), ModelFileError, "draft_vocab_size is 98; allowed"),
    "kind": (say(architectures=["LlamaModel"]), UnsupportedModel, "'LlamaModel' is no EAGLE head; supported"),
    "many": (
        say(num_hidden_layers=17),
        ModelFileError,
        "num_hidden_layers is 17; allowed: a whole number from 1 to 16",
    ),
    "two": (say(num_hidden_layers=2), ModelFileError, r"tensor 'layers.1.input_layernorm.weight' \[64\] is missing"),
    "last": (say(eagle_config={"use_aux_hidden_state": False}), UnsupportedModel, "the last hidden state alone"),
    "fc norm": (say(norm_before_fc=True), ModelFileError, r"tensor 'input_norm.weight' \[192\] is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    change, error, message = BROKEN[case]
    values, tensors = eagle_values(HEAD), eagle_tensors(HEAD)
    change(values, tensors)
    with pytest.raises(error, match=message):
        loaded(tmp_path, values, tensors)


def test_scales_must_be_scales(tmp_path: Path) -> None:
    tensors = eagle_tensors(HEAD)
    tensors |= {"lm_head.weight": torch.ones((40, 64)).char(), "lm_head.weight_scale": torch.full((40, 1), torch.nan)}
    with pytest.raises(ModelFileError, match="holds something that is no scale"):
        loaded(tmp_path, eagle_values(HEAD), tensors)


def test_without_an_embedding_the_sizes_must_agree(tmp_path: Path) -> None:
    head = random_eagle(CONFIG, draft_vocab=40, hidden=32)
    tensors = eagle_tensors(head)
    del tensors["embed_tokens.weight"]
    with pytest.raises(ModelFileError, match=r"embed_tokens.weight is missing, .* does not fit a head of 32"):
        loaded(tmp_path, eagle_values(head), tensors)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa(tmp_path: Path, layers: int, prefix: str) -> None:
    heads = random_medusa(CONFIG, layers=layers)
    tensors = {prefix + name: tensor for name, tensor in medusa_tensors(heads).items()}
    values = {"medusa_num_heads": 2, "medusa_num_layers": layers}  # one fewer than the file has
    read = load_medusa(write_head(tmp_path, values, tensors), CONFIG)
    assert len(read) == 2
    for head, expected in zip(read, heads, strict=False):
        assert torch.equal(head.head, expected.head)
        assert len(head.blocks) == layers
        for block, wanted in zip(head.blocks, expected.blocks, strict=True):
            assert torch.equal(block[0], wanted[0])
            assert torch.equal(block[1], wanted[1])


def test_medusa_by_the_name_of_its_authors(tmp_path: Path) -> None:
    heads = random_medusa(CONFIG)
    write_head(tmp_path, {"medusa_num_heads": 3}, medusa_tensors(heads))
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    assert torch.equal(load_medusa(tmp_path, CONFIG)[2].head, heads[2].head)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_medusa_head_in_a_pickle_is_not_opened(name: str, tmp_path: Path) -> None:
    write_head(tmp_path, {"medusa_num_heads": 3}, medusa_tensors(random_medusa(CONFIG)))
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelFileError, match=rf"{name} is a pickle, which can run code .* convert it to model.safet"):
        load_medusa(tmp_path, CONFIG)


def test_medusa_that_does_not_fit(tmp_path: Path) -> None:
    tensors = medusa_tensors(random_medusa(CONFIG))
    cases = {
        "is missing": ({"medusa_num_heads": 4}, tensors),
        "medusa_num_heads is missing": ({}, tensors),
        r"hidden size 32 .* \(hidden_size 64, vocab_size 97\)": ({"medusa_num_heads": 3, "hidden_size": 32}, tensors),
        "no head of this kind has: other": ({"medusa_num_heads": 3}, {**tensors, "other": torch.ones(1)}),
    }
    for i, (message, (values, changed)) in enumerate(cases.items()):
        with pytest.raises((ModelFileError, InvalidRequest), match=message):
            load_medusa(write_head(tmp_path / str(i), values, changed), CONFIG)
