"""Block drafters that do not fit are refused by what is wrong with them; configs mean what their publishers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters import registry
from paceline.errors import InvalidRequest, ModelFileError, UnknownOption, UnsupportedModel, VocabularyMismatch
from paceline.llm import LLM
from paceline.models.block_config import BlockConfig, block_config, is_block
from paceline.models.block_heads import load_block
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.types import OFF, Rule, SamplingParams, Speculation
from tests.block_heads import DSPARK, LAYOUTS, SHAPE, SLIDING, SPECULATORS, Z_LAB, BlockLayout
from tests.cli.tiny_model import write_model
from tests.heads import eagle_tensors, eagle_values, random_eagle, write_head

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelConfig:
    return open_model(str(folder)).config


def written(tmp_path: Path, target: ModelConfig, name: str = "dflash", **changes: Any) -> Path:
    """A drafter in a published layout, with keys of its config changed; None: left out."""
    head = LAYOUTS[name].write(tmp_path / "head", vocab=target.vocab_size)
    values = json.loads((head / "config.json").read_text()) | changes
    (head / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return head


def change_tensors(head: Path, **tensors: torch.Tensor | None) -> None:
    found = load_file(str(head / "model.safetensors")) | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, head / "model.safetensors")


# ── bad input ──


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"block_size": 1}, ModelFileError, "block_size is 1, of which nothing is drafted"),
        (
            {"block_size": 200, "max_position_embeddings": 64},
            ModelFileError,
            "block_size is 200, longer than a context",
        ),
        ({"block_size": 1000}, ModelFileError, "block_size is 1000; allowed: a whole number from 1 to 256"),
        ({"rope_theta": None}, ModelFileError, "rope_theta is missing"),
        ({"num_target_layers": 36}, InvalidRequest, "num_target_layers is 36, the target has 2 layers"),
        ({"hidden_size": 96}, InvalidRequest, "hidden states of size 96, the target's have 64"),
        ({"vocab_size": 300}, VocabularyMismatch, "a vocabulary of 300"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModel, "'LlamaForCausalLM' is no block drafter"),
        (
            {"architectures": ["LiLiCorrDraftModel"]},
            UnsupportedModel,
            "'LiLiCorrDraftModel' asks for a head of LiLiCorr",
        ),
        ({"speculators_model_type": "xpress"}, UnsupportedModel, "a head of XPress"),
        ({"xpress_rank": 256}, UnsupportedModel, "'xpress_rank' asks for a head of XPress"),
        ({"is_neox_style": False}, UnsupportedModel, "is_neox_style"),
        ({"draft_ffn_type": "moe"}, UnsupportedModel, "mixture of experts"),
        ({"draft_vocab_size": 60}, ModelFileError, "lm_head.weight .60, 64. is missing"),
        ({"layer_types": ["sliding_attention"]}, ModelFileError, "layer_types"),
        ({"layer_types": "sliding"}, ModelFileError, "layer_types"),
        ({"enable_confidence_head": True, "confidence_head_with_markov": True}, ModelFileError, "markov_rank"),
        ({"markov_rank": 4, "markov_head_type": "fir"}, UnsupportedModel, "'fir'; supported: vanilla, gated, rnn"),
    ],
)
def test_configs_that_cannot_be(
    changes: dict[str, Any], error: type[Exception], words: str, target: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        load_block(written(tmp_path, target, **changes), target)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"mask_token_id": 9999}, "mask_token_id is 9999; allowed: a whole number from 0 to"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        (
            {"target_layer_ids": [0, 2]},
            "target_layer_ids is .0, 2.; needed: a list of the target's layers, from -1 to 1",
        ),
        ({"target_layer_ids": None}, "target_layer_ids is None; needed"),
        ({"use_swa": True}, "sliding_window is missing"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"projector_type": "domino"}, "'domino' asks for a head of Domino"),
    ],
)
def test_inner_configs_that_cannot_be(inner: dict[str, Any], words: str, target: ModelConfig, tmp_path: Path) -> None:
    changed = {**Z_LAB["dflash_config"], **inner}
    with pytest.raises((ModelFileError, UnsupportedModel), match=words):
        load_block(written(tmp_path, target, dflash_config=changed), target)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"block_size": 8, "dflash_config": {**Z_LAB["dflash_config"], "block_size": 16}},
            "block_size is 8, but dflash_config.block_size is 16; keep the right one",
        ),
        (
            {"mask_token_id": 3},
            "mask_token_id is 3, but dflash_config.mask_token_id is 7; keep the right one",
        ),
        ({"is_causal": True, "causal": False}, "is_causal is True, but causal is False"),
        ({"sample_from_anchor": True, "shift_label": False}, "sample_from_anchor is True, but shift_label is False"),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, "dspark_bonus_anchor is True, the opposite of"),
        ({"enable_confidence_head": True, "use_confidence_head": False}, "enable_confidence_head is True, but use_"),
        (
            {"aux_hidden_state_layer_ids": [1, 2, 2]},
            r"aux_hidden_state_layer_ids is .1, 2, 2., but target_layer_ids is .0, 1, 2. by that count",
        ),
        ({"pure_draft_prefix_len": 2}, "pure_draft_prefix_len"),
    ],
)
def test_keys_with_two_values(values: dict[str, Any], words: str, target: ModelConfig) -> None:
    with pytest.raises((ModelFileError, UnsupportedModel), match=words):
        read(target, {**Z_LAB, **values})


def test_keys_of_speculators_with_two_values(target: ModelConfig) -> None:
    inner = {**SHAPE, "vocab_size": target.vocab_size}
    for key, value in {"block_size": 9, "mask_token_id": 1, "hidden_size": 32}.items():
        with pytest.raises(ModelFileError, match=rf"{key} is .*, but transformer_layer_config.{key} is {value}"):
            block_config(
                {**SPECULATORS, "hidden_size": 64, "transformer_layer_config": {**inner, key: value}},
                target,
                source="config.json",
            )
    with pytest.raises(ModelFileError, match="algorithm is 'eagle3', but speculators_model_type is 'dflash'"):
        read(target, {**SPECULATORS, "speculators_config": {"algorithm": "eagle3"}})


def test_keys_that_agree_may_stand_twice(target: ModelConfig) -> None:
    said = {"block_size": 6, "mask_token_id": 7, "aux_hidden_state_layer_ids": [0, 1, 2], "shift_label": False}
    config = read(target, {**Z_LAB, **said, "sample_from_anchor": False, "dspark_bonus_anchor": True})
    assert config == read(target, Z_LAB)
    assert read(target, {**Z_LAB, "dspark_bonus_anchor": False}).anchor_first
    nothing = {**Z_LAB, "block_size": 6, "dflash_config": {**Z_LAB["dflash_config"], "block_size": None}}
    assert read(target, nothing).block_size == 6


def test_what_its_publisher_says_of_its_use(folder: Path, target: ModelConfig, tmp_path: Path) -> None:
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    said = {**SPECULATORS["speculators_config"], "verifier": verifier}
    how = registry.recipe(
        f"block:{written(tmp_path, target, 'dspark, speculators', speculators_config=said)}", ready(folder)
    ).how
    assert "trained for Qwen/Qwen3-8B (qwen3; this target is llama); published for drafts of 5" in how


def test_a_choice_has_sizes_that_fit(target: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="conv_group_size is 24; allowed: divisors of the hidden size 64"):
        load_block(
            written(tmp_path, target, "dflash2", dflash_config={**Z_LAB["dflash_config"], "conv_group_size": 24}),
            target,
        )
    with pytest.raises(UnsupportedModel, match="DFlash2 with a markov head"):
        load_block(written(tmp_path, target, "dflash2", markov_rank=8), target)
    with pytest.raises(UnsupportedModel, match=r"DFlash2 with a confidence head \(enable_confidence_head\)"):
        load_block(written(tmp_path, target, "dflash2", enable_confidence_head=True), target)


def test_tensors_that_are_missing_wrong_or_too_many(target: ModelConfig, tmp_path: Path) -> None:
    head = written(tmp_path, target, "dspark, gated")
    change_tensors(head, **{"extra.weight": torch.zeros(3)})
    with pytest.raises(ModelFileError, match=r"1 tensor that no head of this kind has: extra.weight; .* would fit$"):
        load_block(head, target)
    change_tensors(head, **{"extra.weight": None, "markov_head.gate_proj.weight": torch.zeros(8, 64)})
    with pytest.raises(ModelFileError, match=r"'markov_head.gate_proj.weight' is .8, 64.; .* must be .8, 72."):
        load_block(head, target)
    change_tensors(head, **{"markov_head.gate_proj.weight": None})
    with pytest.raises(ModelFileError, match=r"tensor 'markov_head.gate_proj.weight' .8, 72. is missing"):
        load_block(head, target)


@pytest.mark.parametrize(
    ("layout", "more", "words"),
    [
        ("dflash", {"markov_head.markov_w1.weight": (4, 4)}, "or a config.json with a markov_rank$"),
        ("dspark", {"markov_head.joint_proj.weight": (4, 4)}, "or a config.json with markov_head_type rnn$"),
        (
            "dflash",
            {"layers.2.mlp.up_proj.weight": (4, 4), "confidence_head.proj.weight": (1, 4)},
            "without them would fit, or a config.json with a larger num_hidden_layers and enable_confidence_head true$",
        ),
        ("dspark", {"layers.0.mlp_conv.base_kernel": (4,)}, "with architectures of DFlash2DraftModel$"),
        ("dflash2", {"layers.1.mlp.extra": (4,)}, "without it would fit$"),
    ],
)
def test_tensors_that_another_config_would_read(
    layout: str, more: dict[str, tuple[int, ...]], words: str, target: ModelConfig, tmp_path: Path
) -> None:
    head = written(tmp_path, target, layout)
    change_tensors(head, **{name: torch.zeros(size) for name, size in more.items()})
    with pytest.raises(ModelFileError, match=words):
        load_block(head, target, blank=True)


@pytest.mark.parametrize("blank", [False, True])
def test_a_draft_vocabulary_without_its_tokens(blank: bool, target: ModelConfig, tmp_path: Path) -> None:
    """Headers alone show it."""
    head = written(tmp_path, target, "dspark, speculators")
    change_tensors(head, d2t=torch.zeros(61, dtype=torch.int64))
    with pytest.raises(ModelFileError, match=r"tensor 'd2t' is \[61\]; .* it must be \[60\]"):
        load_block(head, target, blank=blank)
    change_tensors(head, d2t=None)
    with pytest.raises(ModelFileError, match="d2t is missing: which 60 of"):
        load_block(head, target, blank=blank)


def test_a_draft_vocabulary_outside_of_the_target(target: ModelConfig, tmp_path: Path) -> None:
    head = written(tmp_path, target, "dspark, speculators")
    change_tensors(head, d2t=torch.full((60,), 10_000))
    with pytest.raises(ModelFileError, match="d2t leads to token 10000"):
        load_block(head, target)


def test_pickles_are_refused_in_words(target: ModelConfig, tmp_path: Path) -> None:
    head = written(tmp_path, target)
    (head / "mask_embedding.pt").write_bytes(b"a pickle")
    with pytest.raises(ModelFileError, match=r"mask_embedding.pt is a pickle, which can run code .*mask_token_id"):
        load_block(head, target)
    (head / "mask_embedding.pt").rename(head / "mask_embedding.safetensors")
    with pytest.raises(ModelFileError, match=r"mask_embedding.safetensors is not read"):
        load_block(head, target)
    (head / "mask_embedding.safetensors").unlink()
    (head / "model.safetensors").rename(head / "model.bin")
    with pytest.raises(ModelFileError, match=r"model.bin is a pickle"):
        load_block(head, target)


# ── what configs mean ──


def read(target: ModelConfig, values: dict[str, Any], **shape: Any) -> BlockConfig:
    inner = {**SHAPE, "vocab_size": target.vocab_size, **shape}
    whole = {**values, "transformer_layer_config": inner} if "speculators_model_type" in values else {**inner, **values}
    return block_config(whole, target, source="config.json")


def test_ids_name_the_layer_that_a_state_leaves_or_enters(target: ModelConfig) -> None:
    assert read(target, Z_LAB).taps == (0, 1, 3)  # 3: before the last norm
    assert read(target, SPECULATORS).taps == (0, 1, 3)


@pytest.mark.parametrize(
    ("values", "windows", "causal"),
    [
        ({**Z_LAB}, (4, 0), (True, False)),
        ({**Z_LAB, "is_causal": False}, (4, 0), (False, False)),
        ({**Z_LAB, "is_causal": True}, (4, 0), (True, True)),
        ({**SPECULATORS}, (4, 0), (True, False)),
        ({**SPECULATORS, "sliding_window_non_causal": True}, (4, 0), (False, False)),
        ({**SPECULATORS, "speculators_model_type": "dflash2"}, (4, 0), (False, False)),
        ({**SPECULATORS, "speculators_model_type": "dspark"}, (4, 0), (True, False)),
    ],
)
def test_windows(
    values: dict[str, Any], windows: tuple[int, ...], causal: tuple[bool, ...], target: ModelConfig
) -> None:
    config = read(target, values, **SLIDING)
    assert (config.decoder.windows, config.causal) == (windows, causal)


def test_windows_of_other_spellings(target: ModelConfig) -> None:
    swa = {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 9}}
    config = read(target, swa, sliding_window=5)
    assert (config.decoder.windows, config.causal) == ((9, 9), (False, False))
    config = read(target, Z_LAB, use_sliding_window=True, max_window_layers=1, sliding_window=5)
    assert (config.decoder.windows, config.causal) == ((0, 5), (False, True))
    assert read(target, Z_LAB, sliding_window=5).decoder.windows == ()


def test_layouts_and_lengths(target: ModelConfig) -> None:
    assert (read(target, Z_LAB).anchor_first, read(target, Z_LAB).longest) == (False, 5)
    assert (read(target, DSPARK).anchor_first, read(target, DSPARK).longest) == (True, 5)
    assert not read(target, {**SPECULATORS, "speculators_model_type": "dspark"}).anchor_first
    assert read(target, {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "shift_label": True}}).anchor_first
    causal = read(target, {**Z_LAB, "is_causal": True})
    assert (causal.rows_for(2), read(target, Z_LAB).rows_for(2)) == (3, 6)
    assert read(target, {**DSPARK, "is_causal": True}).rows_for(2) == 2


def test_block_drafters_are_known_by_their_config() -> None:
    assert is_block(Z_LAB)
    assert is_block({"speculators_model_type": "dspark"})
    assert is_block({"architectures": ["DominoDraftModel"]})
    assert not is_block({"architectures": ["LlamaForCausalLMEagle3"]})
    assert not is_block({})


# ── by what a user calls them ──


def test_a_block_drafter_is_found_wherever_heads_are(folder: Path, target: ModelConfig, tmp_path: Path) -> None:
    head = written(tmp_path, target, "dspark")
    llm = LLM(str(folder), drafter=f"eagle:{head}", format="fp32", **OPTIONS)
    how = llm.parts.drafters["block"].how
    assert how.startswith("a DSpark block drafter (")
    for part in ("2 layers", "blocks of 5, anchor first", "a vanilla markov head of rank 8", "its own confidence"):
        assert part in how
    assert "hidden states 0, 1, 3: torch, float32" in how
    assert "trained for" not in how


@pytest.mark.parametrize("name", ["dspark", "dspark, rnn", "dflash2"])  # ranks that are no multiple of 32
def test_it_is_compiled_beside_a_compiled_target(name: str, folder: Path, target: ModelConfig, tmp_path: Path) -> None:
    head, beside = written(tmp_path, target, name), read_model(str(folder), format="int8", device="cpu")
    llm = LLM(str(folder), drafter=f"block:{head}", format="int8", **OPTIONS)
    assert registry.recipe(f"block:{head}", beside).how.endswith(": compiled")
    for given in ({"temperature": 0.0}, {"seed": 3}, {"seed": 3, "presence_penalty": 0.5, "top_k": 20}):
        params = SamplingParams(max_tokens=16, **given)
        [plain] = llm.generate("a b c a b", params, speculation=OFF)
        [fast] = llm.generate("a b c a b", params, speculation=Speculation(drafter="block", p_min=0.0))
        assert fast.tokens == plain.tokens
        assert fast.stats.drafted > 20
    freely = Speculation(drafter="block", p_min=0.0, rule=Rule.REJECTION)
    [drawn] = llm.generate("a b c a b", SamplingParams(seed=3, max_tokens=16), speculation=freely)
    assert drawn.stats.drafted > 20


def test_a_short_context_is_told(folder: Path, target: ModelConfig, tmp_path: Path) -> None:
    head = written(tmp_path, target, max_position_embeddings=64)
    assert "trained for 64 tokens of context" in registry.recipe(f"block:{head}", ready(folder)).how


def ready(folder: Path) -> ReadyModel:
    return read_model(str(folder), format="fp32", device="cpu")


def test_other_heads_and_options_are_refused(folder: Path, target: ModelConfig, tmp_path: Path) -> None:
    eagle = random_eagle(target, draft_vocab=60)
    write_head(tmp_path / "eagle", eagle_values(eagle), eagle_tensors(eagle))
    with pytest.raises(UnsupportedModel, match=r"is no block drafter.*eagle:PATH"):
        registry.recipe(f"block:{tmp_path / 'eagle'}", ready(folder))
    head = written(tmp_path, target)
    with pytest.raises(UnknownOption, match="branches"):
        registry.recipe(f"block:{head},branches=2", ready(folder))
    for given in (0, 6):
        with pytest.raises(InvalidRequest, match=f"max_draft {given} must be 1 to 5"):
            registry.recipe(f"block:{head},max_draft={given}", ready(folder))
    with pytest.raises(InvalidRequest, match=r"min_confidence 2.0 must be in .0, 1."):
        LLM(str(folder), drafter=f"block:{head},min_confidence=2", format="fp32", **OPTIONS)


def test_every_layout_is_a_block_drafter() -> None:
    assert all(isinstance(layout, BlockLayout) and is_block(layout.values) for layout in LAYOUTS.values())
