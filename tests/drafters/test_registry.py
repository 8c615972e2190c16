"""From a user's words to a drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.drafters import registry
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import InvalidRequest, ModelNotFound, UnknownOption, VocabularyMismatch
from tests.odd_drafters import Silent
from tests.rig import tiny_tokenizer


def a_target(tokenizer: Any, *, compiled: bool = True) -> Any:
    return SimpleNamespace(
        name="target", tokenizer=tokenizer, compiled=compiled, device="cpu", kv_format="bf16", decoder=None
    )


TARGET: Any = a_target(tiny_tokenizer())


def test_ngram_with_options() -> None:
    recipe = registry.recipe("ngram:min_ngram=2,max_ngram=5", TARGET)
    drafter = recipe.build(None)  # type: ignore[arg-type]
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
        ("ngram:min_ngram=9,max_ngram=3", InvalidRequest, "1 <= min_ngram <= max_ngram <= 64 is needed"),
    ],
)
def test_bad_options(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, TARGET)


def test_an_unknown_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, **_: Any) -> Any:
        raise ModelNotFound(name)

    monkeypatch.setattr(registry, "read_model", missing)
    with pytest.raises(UnknownOption, match="unknown drafter 'ngrm'; did you mean 'ngram'"):
        registry.recipe("ngrm", TARGET)
    with pytest.raises(ModelNotFound):
        registry.recipe("model:nowhere", TARGET)


def test_another_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(same_vocabulary=lambda other: "token 3 is b'a' in one and b'b' in the other")
    monkeypatch.setattr(registry, "read_model", lambda name, **_: SimpleNamespace(name=name, tokenizer=tokenizer))
    target = a_target(tokenizer)
    with pytest.raises(VocabularyMismatch, match=r"small cannot draft for target: token 3 .*; take a drafter of"):
        registry.recipe("model:small", target)


def test_kinds_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    registry.register("mine", lambda words, target, progress: registry.Recipe(name=words, build=lambda _: Silent()))
    assert registry.recipe("mine:with words", TARGET).name == "with words"
    with pytest.raises(InvalidRequest, match="already a kind of drafter named 'mine'"):
        registry.register("mine", registry.REGISTRY["ngram"])
    with pytest.raises(InvalidRequest, match="named with letters, digits and underscores, not 'my:kind'"):
        registry.register("my:kind", registry.REGISTRY["ngram"])


def test_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), page_bytes=77, profile=None)
    read = []
    monkeypatch.setattr(registry, "read_model", lambda name, format, **_: read.append((name, format)) or ready)
    for words in ("small", "model:small", "model:small,format=native,max_draft=3"):
        recipe = registry.recipe(words, TARGET)
        assert (recipe.name, recipe.page_bytes, recipe.model) == ("model", 77, ready)
    registry.recipe("small", a_target(tiny_tokenizer(), compiled=False))
    assert read == [("small", "int4-all"), ("small", "int4-all"), ("small", "native"), ("small", "auto")]


def test_the_target_itself_needs_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match=r"needs a GPU; on a CPU take model:target"):
        registry.recipe("self", TARGET)
    with pytest.raises(UnknownOption, match="format of the self drafter"):
        registry.recipe("self:int3", TARGET)
