"""The target in fewer bits on a CPU: which matrices are copied, what is shared, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.drafters import registry, self_on_cpu
from paceline.drafters.self_on_cpu import copy_of, smaller
from paceline.errors import InvalidRequest, UnknownOption
from paceline.kernels.quant import GROUP, quantise
from paceline.llm import LLM
from paceline.models.weights import Format
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.types import SamplingParams, Speculation
from tests.cli.tiny_model import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("self")))


def ready(path: str, format: Format = "int8") -> ReadyModel:
    return read_model(path, format=format)


def bits(count: int) -> Any:
    return quantise(torch.ones(32, GROUP), bits=count, group=GROUP)


def test_matrices_that_lose_bits_are_copied() -> None:
    own = {"embed": bits(8), "layers.0.q": bits(8), "layers.0.k": bits(4), "layers.0.q.bias": torch.ones(32)}
    own |= {"layers.0.k.bias": torch.ones(32), "layers.0.attn_norm": torch.ones(32)}
    fewer = {name: bits(4) if not isinstance(each, torch.Tensor) else each for name, each in own.items()}
    assert [*smaller(own, fewer)] == ["layers.0.q", "layers.0.q.bias"]


@pytest.mark.parametrize("large", ["gate", "up"])
def test_interleaved_matrices_go_together(large: str) -> None:
    own = {f"layers.0.{name}": bits(8 if name == large else 4) for name in ("gate", "up", "down")}
    fewer = {name: bits(4) for name in own}
    assert {*smaller(own, fewer)} == {"layers.0.gate", "layers.0.up"}


@pytest.mark.parametrize(
    ("format", "words", "error", "message"),
    [
        ("int8", "self:int8", InvalidRequest, "no layer of .* loses bits in int8, .* more bits, such as --format fp32"),
        ("int4", "self", InvalidRequest, "no layer of .* loses bits in int4, .* more bits, such as --format int8"),
        ("int8", "self:fp8", UnknownOption, "format of the self drafter on a CPU 'fp8'; known: int4, int8"),
        ("int8", "self:int3", UnknownOption, "unknown format of the self drafter 'int3'"),
        ("int8", "self:int4,max_draft=2", UnknownOption, "unknown format of the self drafter 'int4,max_draft=2'"),
    ],
)
def test_what_is_refused(tiny: str, format: Format, words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, ready(tiny, format))


def test_random_weights_have_no_files() -> None:
    target: Any = SimpleNamespace(name="a shape", decoder=None, stored=None, compiled=True, device="cpu")
    with pytest.raises(InvalidRequest, match="a shape has random weights, and no files to read a copy from"):
        registry.recipe("self", target)


def test_a_copy_has_its_layers_alone(tiny: str) -> None:
    target = ready(tiny)
    copy = copy_of(target, "int4")
    assert {name.split(".")[0] for name in copy.model.weights} == {"layers"}
    assert 0 < copy.unread_bytes < 0.7 * target.unread_bytes
    recipe = registry.recipe("self:int4", target)
    assert (recipe.name, recipe.page_bytes, recipe.model and recipe.model.why) == ("self", 0, copy.why)
    assert copy.pass_bytes < recipe.pass_bytes < target.pass_bytes
    assert recipe.how == "the target's layers in int4, on its KV memory"


def test_everything_else_is_the_target_s(tiny: str) -> None:
    llm = LLM(tiny, drafter="self:int4", format="int8", threads=1, kv_memory=4 << 20)
    target = llm.parts.context.target
    drafter: Any = llm.parts.engine.drafters["self"]._drafter
    copy = drafter.forward
    assert isinstance(target, CompiledForward)
    assert copy.kv is target.kv
    assert (copy.embedding.address, copy.output.address) == (target.embedding.address, target.output.address)
    assert copy.pack.vector("norm").data_ptr() == target.pack.vector("norm").data_ptr()
    assert copy.pack.matrix("layers.0.q").address != target.pack.matrix("layers.0.q").address
    assert copy.pack.matrix("layers.0.q").format != target.pack.matrix("layers.0.q").format
    assert {*self_on_cpu.FORMATS} == {"int4", "int8"}


@pytest.mark.parametrize("format", ["int8", "fp32"])
def test_the_text_is_the_target_s(tiny: str, format: str) -> None:
    """Compiled the copy shares KV memory; in torch it has its own. What drafts cost does not count: passes of so small
    a model take any time."""
    llm = LLM(tiny, drafter="self:int4", format=format, threads=1, kv_memory=4 << 20, measure_cost=False)
    made = llm.parts.drafters["self"]
    assert bool(made.page_bytes) == (format == "fp32")
    prompts = ["abc abc", "the quick brown"]
    said = llm.generate(prompts, GREEDY, speculation=Speculation(drafter="self"))
    plain = llm.generate(prompts, GREEDY, speculation=Speculation(enabled=False))
    assert [each.tokens for each in said] == [each.tokens for each in plain]
    assert sum(each.stats.accepted for each in said) > 0
    assert llm.parts.engine.drafters["self"].name == "self"
    assert Path(tiny).exists()
