from __future__ import annotations

import json

import pytest

from paceline.cli import demo
from paceline.cli.style import GREEN_BOLD, RESET
from paceline.types import SamplingParams
from tests.cli.conftest import Cli

TINY = ("--format", "int8", "--threads", "1", "--max-tokens", "12", "--rounds", "1")


def test_json_for_the_embedded_model(cli: Cli) -> None:
    unhurried = "--no-measure-cost"  # what is drafted must not depend on the clock
    status, out, err = cli("demo", "--json", "--max-tokens", "32", "--rounds", "1", unhurried)
    assert (status, err) == (0, "")
    results = json.loads(out.splitlines()[-1])
    assert list(results) == ["greedy", "sampled"]
    for result in results.values():
        assert list(result) == ["plain_tok_s", "speculative_tok_s", "tokens_per_step", "identical", "tokens_per_round"]
        assert result["identical"] is True
        assert result["tokens_per_step"] == result["tokens_per_round"] > 3
        assert result["plain_tok_s"] > 0
        assert result["speculative_tok_s"] > 0


def test_for_people(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT", "abcabcabc")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, err = cli("demo", tiny, *TINY)
    assert (status, err) == (0, "")
    assert f"{GREEN_BOLD}like this{RESET}: drafted, and the target agreed" in out
    for case in ("greedy", "sampled"):
        assert f"{case}, plain" in out
        assert f"{case}, speculative" in out
    assert out.endswith("\nsame text: yes\n")


def test_two_texts_are_an_alarm(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT", "abcabcabc")
    monkeypatch.setattr(demo, "CASES", {"sampled": SamplingParams(temperature=2)})  # no seed: never the same twice
    status, out, err = cli("demo", tiny, *TINY, "--json")
    assert status == 1
    assert json.loads(out)["sampled"]["identical"] is False
    assert "SAME TEXT: NO" in err
    status, out, err = cli("demo", tiny, *TINY)
    assert status == 1
    assert "same text: yes" not in out
    assert "SAME TEXT: NO" in err
