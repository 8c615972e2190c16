"""From a user's words to a drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.drafters import model, ngram, registry
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.recipe import Recipe, name_by
from paceline.errors import InvalidRequest, ModelNotFound, NoCompiler, OutOfMemory, UnknownOption
from paceline.models.load import LoadedModel
from paceline.runner.loading.models import ReadyModel
from tests.odd_drafters import Silent
from tests.other_vocabularies import permuted
from tests.tiny_models import VOCAB, Model, tiny_tokenizer


def a_target(tokenizer: Any, *, compiled: bool = True, decoder: Any = None) -> Any:
    return SimpleNamespace(
        name="target",
        tokenizer=tokenizer,
        compiled=compiled,
        device="cpu",
        kv_format="bf16",
        decoder=decoder,
        model=with_vocabulary(100),
        splits_drafters=False,
    )


def with_vocabulary(size: int) -> Any:
    return SimpleNamespace(config=SimpleNamespace(vocab_size=size, mask_token=None, max_context=64))


TARGET: Any = a_target(tiny_tokenizer())


def test_ngram_with_options() -> None:
    recipe = registry.recipe("ngram:min_ngram=2,max_ngram=5", TARGET)
    drafter = recipe.build(None)
    assert isinstance(drafter, NgramDrafter)
    assert list(drafter._sizes) == [5, 4, 3, 2]
    assert (recipe.name, recipe.page_bytes, recipe.model) == ("ngram", 0, None)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("ngram:min_ngrm=2", UnknownOption, "unknown option of the ngram drafter 'min_ngrm'; did you mean 'min_ngram'"),
        ("ngram:min_ngram=x", InvalidRequest, "ngram:min_ngram must be a whole number, not 'x'"),
        ("ngram:min_ngram=-1", InvalidRequest, "1 <= min_ngram <= max_ngram <= 64 is needed"),
        ("model:small,max_draft=x", InvalidRequest, "model:max_draft must be a whole number, not 'x'"),
        ("model:small,min_confidence=x", InvalidRequest, "model:min_confidence must be a number, not 'x'"),
        ("model:small,form=int8", UnknownOption, "option of the model drafter 'form'; did you mean 'format'"),
        ("ngram:min_ngram", InvalidRequest, "must be a whole number"),
        ("ngram:min_ngram=1,min_ngram=2", InvalidRequest, "ngram:min_ngram is given twice: keep the right one"),
        ("model:small,max_draft=2,max_draft=2", InvalidRequest, "model:max_draft is given twice"),
        ("ngram:min_ngram=9,max_ngram=3", InvalidRequest, "1 <= min_ngram <= max_ngram <= 64 is needed"),
    ],
)
def test_bad_options(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, TARGET)


def test_an_unknown_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, **_: Any) -> Any:
        raise ModelNotFound(name)

    monkeypatch.setattr(model, "read_model", missing)
    with pytest.raises(UnknownOption, match="unknown drafter 'ngrm'; did you mean 'ngram'"):
        registry.recipe("ngrm", TARGET)
    with pytest.raises(ModelNotFound):
        registry.recipe("model:nowhere", TARGET)


def test_another_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = replace(ready_tiny(), tokenizer=permuted()[0], shortlist=True)
    monkeypatch.setattr(model, "read_model", lambda name, **_: ready)
    made = registry.recipe("model:small", a_target(tiny_tokenizer()))
    assert made.on_device is None
    assert made.vocabulary == VOCAB - 1, "all but the control token"
    assert made.model is not None
    assert not made.model.shortlist, "drafts over a bridge compute all outputs"


def ready_tiny() -> ReadyModel:
    config = Model().config
    loaded = LoadedModel(kind="hf", path=Path(), config=config, weights=dict(Model().weights), metadata={})
    return ReadyModel("small", loaded, tiny_tokenizer(), compiled=False, why="in torch")


def test_kinds_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    registry.register("mine", lambda words, target, progress: registry.Recipe(name=words, build=lambda _: Silent()))
    assert registry.recipe("mine:with words", TARGET).name == "with words"
    with pytest.raises(InvalidRequest, match="already a kind of drafter named 'mine'"):
        registry.register("mine", ngram.recipe)
    with pytest.raises(InvalidRequest, match="named with letters, digits and underscores, not 'my:kind'"):
        registry.register("my:kind", ngram.recipe)


def a_model(**fields: Any) -> Any:
    given = {"page_bytes": 77, "pass_bytes": 99, "why": "as it can", "profile": None, "name": "small"}
    given["model"] = with_vocabulary(90)
    return SimpleNamespace(**given | {"tokenizer": tiny_tokenizer(), "compiled": True, "stored": None} | fields)


def test_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = a_model()
    read = []
    monkeypatch.setattr(model, "read_model", lambda name, format, **_: read.append((name, format)) or ready)
    for words in ("small", "model:small", "model:small,format=native,max_draft=3"):
        recipe = registry.recipe(words, TARGET)
        assert (recipe.name, recipe.page_bytes, recipe.model) == ("model", 77, ready)
        assert (recipe.pass_bytes, recipe.how, recipe.vocabulary) == (99, "as it can", 90)
    registry.recipe("small", a_target(tiny_tokenizer(), compiled=False))
    assert read == [("small", "int4-all"), ("small", "int4-all"), ("small", "native"), ("small", "auto")]


def test_a_draft_fits_the_context_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "read_model", lambda name, **_: a_model())
    assert registry.recipe("model:small,max_draft=64", TARGET).name == "model"
    with pytest.raises(InvalidRequest, match="max_draft 65: a draft must fit small's max_position_embeddings of 64"):
        registry.recipe("model:small,max_draft=65", TARGET)


def test_a_model_on_a_gpu_has_8_bit_floats_unless_another_format_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(model, "read_model", lambda name, format, **_: read.append(format) or a_model())
    on_gpu = a_target(tiny_tokenizer(), compiled=False, decoder="on a device")
    for words in ("small", "small,max_draft=3", "small,format=auto", "small,format=int4"):
        registry.recipe(f"model:{words}", on_gpu)
    assert read == ["fp8", "fp8", "auto", "int4"]


@pytest.mark.parametrize(
    ("times", "formats"),
    [
        ({"int4-all": 1.0, "int8": 2.0}, ["int4-all"]),
        ({"int4-all": 1.0, "int8": 0.9}, ["int4-all"]),  # not by more than noise
        ({"int4-all": 2.0, "int8": 1.0}, ["int4-all", "int8"]),
        (None, ["int4-all"]),  # too busy a machine to measure
    ],
)
def test_a_model_in_the_fastest_format(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, float] | None, formats: list[str]
) -> None:
    read = []
    ready = a_model(stored="in files")
    monkeypatch.setattr(model, "read_model", lambda name, format, **_: read.append(format) or ready)
    monkeypatch.setattr(model, "format_times", lambda ready, formats: times)
    registry.recipe("small", TARGET)
    assert read == formats


@pytest.mark.parametrize(
    ("words", "decoder", "warns"),
    [
        ("model:small,min_confidence=0.5", object(), True),
        ("model:small,min_confidence=0", object(), False),
        ("model:small", object(), False),
        ("model:small,min_confidence=0.5", None, False),
    ],
)
def test_a_confidence_that_a_device_ignores(
    words: str, decoder: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "read_model", lambda name, **_: a_model())
    registry.recipe(words, a_target(tiny_tokenizer(), decoder=decoder))
    said = ["min_confidence of small ends no draft on a GPU" in record.getMessage() for record in caplog.records]
    assert said == [True] * warns


class FakeDecoder:
    """Has matrices by name; a copy has those that can lose bits anew."""

    def __init__(self, *matrices: str) -> None:
        self._matrices = [*matrices]
        self.config = Model().config
        self.weight_bytes = 10 * len(matrices)

    def matrices(self) -> list[str]:
        return self._matrices

    def quantised(self, format: str) -> FakeDecoder:
        return FakeDecoder(*(name if name == "int8" else f"{name} in {format}" for name in self._matrices))

    def profile(self, rows: int, outs: int) -> None:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "runs in torch"),
        ({"decoder": FakeDecoder("fp8")}, "runs on a GPU"),
        ({"compiled": True, "split": "in two"}, "is split over ranks"),
    ],
)
def test_branches_are_refused_where_a_model_drafts_chains(
    fields: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: Any = ready_tiny()
    monkeypatch.setattr(model, "read_model", lambda name, **_: replace(ready, **fields))
    target = a_target(tiny_tokenizer(), compiled=False, decoder=fields.get("decoder"))
    with pytest.raises(InvalidRequest, match=f"branches 3: small {why}, and drafts of a model have branches only"):
        registry.recipe("model:small,branches=3", target)
    if "split" not in fields:
        assert registry.recipe("model:small,branches=1", target).name == "model"
        monkeypatch.setattr(model, "read_model", lambda name, **_: replace(ready, compiled=True))
        assert registry.recipe("model:small,branches=3", TARGET).name == "model"


def test_the_target_in_fewer_bits() -> None:
    recipe = registry.recipe("self:int4", a_target(None, decoder=FakeDecoder("bf16", "int8")))
    assert (recipe.page_bytes, recipe.pass_bytes, recipe.model) == (0, 20, None)
    assert recipe.how == "the target in int4, on its KV memory"


def test_a_target_that_has_no_bits_to_lose() -> None:
    with pytest.raises(InvalidRequest, match="no matrix of target can lose bits: as loaded all have 8 or fewer"):
        registry.recipe("self", a_target(None, decoder=FakeDecoder("int8", "int8")))


def test_no_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 8 << 30))
    decoder = FakeDecoder("bf16")
    recipe = registry.recipe("self", a_target(None, decoder=decoder))
    assert recipe.profile is not None
    with pytest.raises(OutOfMemory, match=r"a pass of 7 tokens of the copy of target: 1.0 of 8.0 GiB are free"):
        recipe.profile(7, 2)
    monkeypatch.setattr(decoder, "quantised", lambda format: decoder.profile(1, 1))
    with pytest.raises(OutOfMemory, match=r"a copy of target in fp8: 1.0 of 8.0 GiB are free on the device; take a"):
        registry.recipe("self", a_target(None, decoder=decoder))


def test_on_a_cpu_a_lookup_and_a_portfolio_complete_what_a_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        (): [],
        ("ngram",): ["ngram"],
        ("prediction",): ["prediction"],
        ("eagle:a",): ["eagle:a", "suffix", "portfolio"],
        ("./small.gguf", "ngram"): ["./small.gguf", "ngram", "portfolio"],
        ("portfolio",): ["suffix", "portfolio"],
        ("portfolio", "medusa:b"): ["medusa:b", "suffix", "portfolio"],
    }
    for named, loaded in cases.items():
        assert registry.completed(named, "cpu") == loaded
        assert registry.completed(named, "cuda") == [*named]

    def no_compiler() -> None:
        raise NoCompiler("there is none")

    monkeypatch.setattr(registry, "load_library", no_compiler)
    assert registry.completed(["eagle:a"], "cpu") == ["eagle:a", "ngram", "portfolio"]


def test_a_drafter_is_known_by_the_words_that_loaded_it() -> None:
    """`eagle:PATH` of a block drafter is loaded as `block`; words that were completed go by their kind."""
    block = Recipe("block", build=lambda context: None, words="eagle:/heads/block")
    recipes = {"block": block, "eagle": replace(block, name="eagle", words="eagle:smollm2")}
    assert name_by("eagle:/heads/block", recipes) == "block"
    assert name_by("eagle", recipes) == "eagle"
    assert name_by("small.gguf", recipes) == "model"
