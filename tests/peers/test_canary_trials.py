"""Trials of the canary with a tiny model: each kind ends as it must, and no text changes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters import registry
from paceline.drafters.recipe import DrafterKind
from paceline.llm import LLM
from peers import canary_trials
from peers.canary_trials import Trials, simulated, trial_recipe
from tests.cli.tiny_model import write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_model(tmp_path_factory.mktemp("trials"))
    return LLM(str(path), drafter="suffix", format="int8", threads=1, measure_cost=False, measure_speedup=False)


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DrafterKind(lambda options, target, progress: trial_recipe(options, 0.002))
    monkeypatch.setitem(registry.REGISTRY, "trial", made)


@pytest.mark.parametrize("kind", ["equal", "raises"])
def test_no_text_changes_and_one_that_raises_is_out(llm: LLM, kind: str) -> None:
    trials = Trials(llm, prompts=["abcabcabc", "xyxyxy"], tokens=12, at_once=2)
    row = asyncio.run(trials.run(kind, share=0.5, requests=16, min_requests=5))
    assert (row["changed"], row["lost"]) == (0, 0)
    if kind == "raises":
        assert row["canary"]["phase"] == "rolled back"
        assert row["canary"]["arms"]["canary"]["requests"] <= 10
        assert "raised RuntimeError" in row["canary"]["reason"]
    else:
        assert row["canary"]["phase"] in ("running", "promoted", "rolled back")  # the machine's clock decides
        assert row["canary"]["arms"]["canary"]["requests"] > 0
    assert set(llm.engine.drafters) == {"suffix", "prediction"}


def test_the_command_simulates_and_saves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few: Any = ((1.0, 50), (0.5, 400))
    monkeypatch.setattr(canary_trials, "SIMULATED", few)
    monkeypatch.setattr(sys, "argv", ["trials", "--simulate", "5", "--save", str(tmp_path / "rows.json")])
    canary_trials.main()
    assert "'rolled back': 1.0" in capsys.readouterr().out
    assert (tmp_path / "rows.json").exists()
    assert [row["speed"] for row in simulated(2, share=0.5)] == [1.0, 0.5]
