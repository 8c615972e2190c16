"""Kinds of drafters that a user brings along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.registry import REGISTRY, Recipe, recipe, register
from paceline.errors import InvalidRequest


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def mine(options: str, target: Any, progress: Any) -> Recipe:
    return Recipe(name=f"mine-{options}", build=lambda setting: NgramDrafter())


def test_a_registered_kind_gets_what_stands_after_the_colon() -> None:
    register("mine", mine)
    assert recipe("mine:a:b", None).name == "mine-a:b"
    assert recipe("mine", None).name == "mine-"


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_a_name_means_one_kind(name: str) -> None:
    with pytest.raises(InvalidRequest, match="already a kind of drafter"):
        register(name, mine)


@pytest.mark.parametrize("name", ["", "a:b", "my kind", "../x"])
def test_a_name_is_a_word(name: str) -> None:
    with pytest.raises(InvalidRequest, match="letters, digits and underscores"):
        register(name, mine)
