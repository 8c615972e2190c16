"""Old names of modules still import, and say where the module is now."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline.moved import MOVED, install

PACKAGES = {
    "paceline.chat": ("paceline.chat.template", "ChatTemplate"),
    "paceline.sampling": ("paceline.sampling.sampler", "Sampler"),
    "paceline.prompts": ("paceline.prompts.files", "read_prompts"),
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_is_the_new_one(old: str) -> None:
    sys.modules.pop(old, None)
    new = importlib.import_module(MOVED[old])
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is not None
    assert new.__spec__.name == MOVED[old]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_that_became_a_package_keeps_its_names(package: str) -> None:
    module, name = PACKAGES[package]
    with pytest.warns(DeprecationWarning, match=rf"{package}\.{name} has moved"):
        found = getattr(importlib.import_module(package), name)
    assert found is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = importlib.import_module(package).nothing_like_it


def test_installing_twice_adds_one_finder() -> None:
    before = len(sys.meta_path)
    install()
    assert len(sys.meta_path) == before
