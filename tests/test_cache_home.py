from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cache_home import cache_home


def test_the_nearest_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert cache_home() == Path("/home/me/own")
    monkeypatch.setenv("PACELINE_CACHE", "")
    assert cache_home() == Path("/xdg/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path("/home/me/.cache/paceline")
