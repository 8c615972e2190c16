"""Which files of a repository a name means."""

from __future__ import annotations

import pytest

from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.models.hub.choice import PREFERRED, choose, choose_gguf, tag_of
from paceline.models.hub.names import HubName, hub_name


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-3-1b-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-IQ3_XXS.gguf", "IQ3_XXS"),
        ("BF16/model-BF16-00001-of-00002.gguf", "BF16"),
        ("ggml-model-f16.gguf", "F16"),
        ("model.gguf", "model"),
    ],
)
def test_tags(path: str, tag: str) -> None:
    assert tag_of(path) == tag


def files(*tags: str) -> list[str]:
    return [f"model-{tag}.gguf" for tag in tags]


@pytest.mark.parametrize(
    ("tags", "chosen"),
    [
        (("Q2_K", "Q4_0", "Q4_K_M", "Q8_0"), "Q4_K_M"),
        (("Q2_K", "Q8_0", "Q6_K"), "Q6_K"),
        (("f16", "iq2_xxs"), "f16"),
        (("IQ2_XXS",), "IQ2_XXS"),
    ],
)
def test_the_preferred_quantisation(tags: tuple[str, ...], chosen: str) -> None:
    assert choose_gguf(files(*tags), HubName("o/n")) == f"model-{chosen}.gguf"


def test_a_quantisation_that_is_asked_for() -> None:
    there = [*files(*PREFERRED), "UD/model-UD-Q8_0.gguf"]
    assert choose(there, HubName("o/n", "q8_0")) == ["model-Q8_0.gguf"]
    assert choose(there, HubName("o/n", "ud-q8_0")) == ["UD/model-UD-Q8_0.gguf"]
    assert choose(there, HubName("o/n", "model-Q6_K.gguf")) == ["model-Q6_K.gguf"]
    with pytest.raises(ModelNotFound, match="no file of the quantisation 'Q8'; did you mean 'Q8_0'"):
        choose(there, HubName("o/n", "Q8"))


def test_what_is_no_model_is_not_chosen() -> None:
    assert choose(["mmproj-model-f16.gguf", "imatrix.gguf", "m-Q8_0.gguf"], HubName("o/n")) == ["m-Q8_0.gguf"]


def test_files_of_a_split_model_are_refused_by_name() -> None:
    parts = ["m-q4_k_m-00001-of-00002.gguf", "m-q4_k_m-00002-of-00002.gguf"]
    assert choose([*parts, "m-q8_0.gguf"], HubName("o/n")) == ["m-q8_0.gguf"]
    with pytest.raises(UnsupportedModel, match=r"o/n:Q4_K_M is split into several files.*\(Q8_0\).*--merge"):
        choose([*parts, "m-q8_0.gguf"], HubName("o/n", "Q4_K_M"))
    with pytest.raises(UnsupportedModel, match="no whole file"):
        choose(parts, HubName("o/n"))


def test_a_directory_before_its_gguf_files() -> None:
    both = ["config.json", "model.safetensors", "model-Q8_0.gguf"]
    assert choose(both, HubName("o/n")) == ["model.safetensors", "config.json"]
    assert choose(both, HubName("o/n", "Q8_0")) == ["model-Q8_0.gguf"]
    with pytest.raises(ModelNotFound, match=r"has no GGUF files.*leave it out"):
        choose(both[:2], HubName("o/n", "Q8_0"))


@pytest.mark.parametrize(
    "name", ["a", "a/b/c", "/a", "a/", "../b", "a/..", "a/b:", "a/b:c/d", "a/b:..", "a b/c", "-a/b"]
)
def test_names_that_are_none(name: str) -> None:
    assert hub_name(name) is None


def test_names() -> None:
    assert hub_name("Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0") == HubName("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "q8_0")
    assert str(hub_name("a/b:Q8_0")) == "a/b:Q8_0"
    assert str(hub_name("a/b")) == "a/b"
