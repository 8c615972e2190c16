"""Kinds of drafters that a user brings along."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.registry import REGISTRY, Recipe, check_device, recipe, register
from paceline.errors import InvalidRequest

CPU: Any = SimpleNamespace(device="cpu")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def mine(options: str, target: Any, progress: Any) -> Recipe:
    return Recipe(name=f"mine-{options}", build=lambda context: NgramDrafter())


def test_a_registered_kind_gets_what_stands_after_the_colon() -> None:
    register("mine", mine)
    assert recipe("mine:a:b", CPU).name == "mine-a:b"
    assert recipe("mine", CPU).name == "mine-"


def test_a_kind_that_knows_only_the_host_is_refused_on_a_gpu() -> None:
    """By its name alone: there is no target yet."""
    register("mine", mine)
    register("beside", mine, on_gpu="host")
    register("inside", mine, on_gpu="device")
    with pytest.raises(InvalidRequest, match=r"'mine' runs on a CPU only: it has no paceline.drafters.DeviceDrafter"):
        check_device("mine:a", "cuda")
    for words, device in (("mine:a", "cpu"), ("beside", "cuda"), ("inside", "cuda"), ("some/model", "cuda")):
        check_device(words, device)
    for name in REGISTRY.keys() - {"mine", "portfolio", "block", "layers", "recycling", "lookahead"}:
        check_device(name, "cuda")


def test_a_kind_for_the_device_must_have_a_drafter_for_it() -> None:
    register("inside", mine, on_gpu="device")
    assert recipe("inside", CPU).name == "mine-"
    with pytest.raises(InvalidRequest, match="its recipe has no on_device that returns a paceline"):
        recipe("inside", SimpleNamespace(device="cuda:0"))


def fails(context: Any) -> NgramDrafter:
    raise KeyError("a weight")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *given: 1 // 0, "drafter 'mine' cannot be built: ZeroDivisionError: integer division"),
        (lambda *given: None, "drafter 'mine' made a NoneType instead of a paceline.drafters.Recipe"),
        (lambda *given: Recipe(name="mine", build=fails), "drafter 'mine' cannot be built: KeyError: 'a weight'"),
    ],
)
def test_a_kind_that_cannot_be_built_is_named(make: Any, message: str) -> None:
    register("mine", make)
    with pytest.raises(InvalidRequest, match=message):
        recipe("mine", CPU).build(SimpleNamespace())  # type: ignore[arg-type]  # it is not looked at


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_a_name_means_one_kind(name: str) -> None:
    with pytest.raises(InvalidRequest, match="already a kind of drafter"):
        register(name, mine)


@pytest.mark.parametrize("name", ["", "a:b", "my kind", "../x"])
def test_a_name_is_a_word(name: str) -> None:
    with pytest.raises(InvalidRequest, match="letters, digits and underscores"):
        register(name, mine)
