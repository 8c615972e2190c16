"""Pairs of a short study: each candidate has a verdict, or the reason why it has none."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import build_parsers
from paceline.cli.pair import ASKED, pair_lines, pairs_of
from paceline.errors import InvalidRequest
from paceline.tune import pairs as measured


@pytest.fixture
def short(tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two\nthree four three four\n", encoding="utf-8")
    return {**ASKED, "prompts": [str(prompts)], "max_tokens": 8, "draft": (2,), "raw": True, "ignore_eos": True}


def arguments(target: str) -> Namespace:
    return build_parsers()[0].parse_args(["inspect", target, "--device", "cpu", "--threads", "1"])


def test_a_candidate_that_cannot_be_loaded_says_why(tiny: str, short: dict[str, Any]) -> None:
    pairs = {pair["drafter"]: pair for pair in pairs_of(arguments(tiny), asked={**short, "candidates": "nosuch,ngram"})}
    assert [*pairs] == ["suffix", "nosuch", "ngram"]
    [said] = pair_lines(pairs["nosuch"])
    assert said.startswith("nosuch is not judged: unknown drafter 'nosuch'")
    assert "why_not" not in pairs["ngram"]
    assert "times plain speed" in pair_lines(pairs["ngram"])[0]


def test_one_that_fails_while_it_is_judged_says_why(
    tiny: str, short: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def acceptance(llm: Any, words: str, asking: Any) -> Any:
        raise InvalidRequest(f"{words} broke")

    monkeypatch.setattr(measured, "acceptance", acceptance)
    [pair] = pairs_of(arguments(tiny), asked={**short, "candidates": "suffix"})
    assert pair_lines(pair) == ["suffix is not judged: suffix broke"]


def test_time_that_was_over_is_said(tiny: str, short: dict[str, Any]) -> None:
    """Not that nothing could be drafted."""
    pairs = pairs_of(arguments(tiny), asked={**short, "candidates": "ngram", "minutes": 1e-9})
    assert [pair["drafter"] for pair in pairs] == ["suffix", "ngram"]
    for pair in pairs:
        [said] = pair_lines(pair)
        assert f"{pair['drafter']} is not judged: the 1e-09 minutes of the study were over before" in said
