"""MTP heads by what a user calls them, and by default."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.cli.main import build_parsers
from paceline.cli.options import drafters_of
from paceline.drafters import registry
from paceline.errors import InvalidRequest, ModelFileError, ModelNotFound, UnknownOption, UnsupportedModel
from paceline.llm import LLM
from paceline.runner.loading.models import read_model, ready_shape
from paceline.types import OFF, SamplingParams, Speculation
from tests.cli.tiny_model import write_model
from tests.mtp_checkpoints import COUNT, LAYOUTS

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def mimo(tmp_path: Path) -> Path:
    return LAYOUTS["MiMo"].write(tmp_path)[0]


def test_a_head_in_the_checkpoint_drafts_by_default(mimo: Path) -> None:
    args = build_parsers()[0].parse_args(["generate", str(mimo), "p", "--device", "cpu"])
    assert drafters_of(args) == ["mtp", "suffix", "portfolio"]
    assert registry.default_drafters(str(mimo), "cuda") == ["mtp"]
    llm = LLM(str(mimo), format="int8", **OPTIONS)
    assert [*llm.parts.drafters] == ["mtp", "suffix", "portfolio"]
    answer = llm.generate("abc", PARAMS, speculation=Speculation(drafter="mtp"))[0]
    assert answer.stats.drafted > 0
    assert answer.tokens == llm.generate("abc", PARAMS, speculation=OFF)[0].tokens
    assert [*LLM(read_model(str(mimo)), **OPTIONS).parts.drafters] == ["mtp", "suffix", "portfolio"]
    assert not LLM(str(mimo), drafter=[], **OPTIONS).parts.drafters


def test_targets_without_one_have_none() -> None:
    assert registry.own_heads("smollm2") == ["eagle:smollm2"]
    assert registry.own_heads(ready_shape("smollm2-135m")) == []
    assert registry.own_heads("./no/such/model") == []


@pytest.mark.parametrize("broken", ["tensor", "count", "tensors"])
def test_a_head_that_cannot_be_used_is_left_and_told(mimo: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """The target runs with its other default, and the text is the same."""
    values, tensors = json.loads((mimo / "config.json").read_text()), load_file(mimo / "model.safetensors")
    if broken == "count":
        del values[COUNT]
    else:
        some = "model.mtp_layers.0.input_proj" if broken == "tensor" else "model.mtp_layers."
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(some)}
    (mimo / "config.json").write_text(json.dumps(values))
    save_file(tensors, mimo / "model.safetensors")
    llm = LLM(str(mimo), format="int8", **OPTIONS)
    assert [*llm.parts.drafters] == ["suffix"]
    [said] = [each.getMessage() for each in caplog.records if "MTP" in each.getMessage()]
    assert "the MTP head in the checkpoint is not used, and the target runs without it:" in said
    wanted = {"tensor": "'model.mtp_layers.0.input_proj.weight'", "count": COUNT, "tensors": COUNT}[broken]
    assert wanted in said
    with pytest.raises(ModelFileError, match=wanted):
        LLM(str(mimo), drafter="mtp", **OPTIONS)


def test_a_broken_target_is_told_by_loading_it_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("[]")
    assert registry.own_heads(str(tmp_path)) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("mtp", UnsupportedModel, "no MTP head: no tensors"),
        ("mtp:max_draft=2,depth=3", UnknownOption, "option of the mtp drafter 'depth'"),
        ("mtp:format=fp8", UnknownOption, "format of the mtp drafter 'fp8'"),
        ("mtp:/no/such/place", ModelNotFound, "no model '/no/such/place'"),
        ("mtp:smollm2", UnsupportedModel, "no MTP head"),
        ("mtp:{head},max_draft=many", InvalidRequest, "mtp:max_draft must be a whole number, not 'many'"),
        ("mtp:{head},max_draft=999", InvalidRequest, "max_draft 999: a draft must fit the head's"),
        ("eagle:{head}", UnsupportedModel, "'mtp' is no EAGLE head; an MTP head loads as mtp:PATH"),
    ],
)
def test_what_is_no_head(words: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    target, head = LAYOUTS["alone for Llama"].write(tmp_path)
    with pytest.raises(error, match=message):
        LLM(str(target), drafter=words.format(head=head), **OPTIONS)


def test_a_gguf_file_has_no_head_inside() -> None:
    with pytest.raises(InvalidRequest, match="reads the head in a directory of safetensors, and smollm2 is none"):
        registry.recipe("mtp", read_model("smollm2"))


def test_a_head_beside_a_target_on_a_gpu(mimo: Path) -> None:
    """By Triton's interpreter: rounds run it, and the host builds nothing."""
    pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")
    from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv

    ready = read_model(str(mimo), format="fp32")
    weights = {name: weight.float() for name, weight in ready._read().items() if isinstance(weight, Tensor)}
    made = CudaDecoder(ready.model.config, weights, max_context=128, dtype=torch.float32, device="cpu", pdl=False)
    beside = replace(ready, decoder=made, stored=None)
    recipe = registry.recipe("mtp", beside)
    target = CudaForward(made, new_kv(ready.model.config, num_pages=6, dtype=torch.float32, device="cpu"))
    assert (recipe.name, recipe.build(None)) == ("mtp", None)
    drafter = recipe.on_device(None, target)
    assert (drafter.taps, drafter.head.kv.num_pages) == ((2,), 6)


def test_two_heads_of_one_target(tmp_path: Path) -> None:
    """An MTP head beside another kind reads its own hidden states, and has its own name."""
    from tests.heads import eagle_tensors, eagle_values, random_eagle, write_head

    target, head = LAYOUTS["alone for Llama"].write(tmp_path)
    eagle = random_eagle(read_model(str(target)).model.config, draft_vocab=60)
    path = write_head(tmp_path / "eagle", eagle_values(eagle), eagle_tensors(eagle))
    words = [f"eagle:{path},min_confidence=0", f"mtp:{head},min_confidence=0"]
    llm = LLM(str(target), drafter=words, format="int8", **OPTIONS)
    wanted = llm.generate("abc", PARAMS, speculation=OFF)[0].tokens
    for kind in ("eagle", "mtp"):
        answer = llm.generate("abc", PARAMS, speculation=Speculation(drafter=kind))[0]
        assert (answer.tokens, answer.stats.drafted > 0) == (wanted, True)
    assert llm.engine.probes.forward.taps == [0, 1, 2]


def test_the_head_of_another_checkpoint(mimo: Path, tmp_path: Path) -> None:
    """mtp:PATH takes a whole checkpoint, too, such as the one that a target was made from."""
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other")
    llm = LLM(str(other), drafter=f"mtp:{mimo}", format="int8", **OPTIONS)
    assert "an MTP head" in llm.parts.drafters["mtp"].how
