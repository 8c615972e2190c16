"""The check itself, and that the prompts we train on pass it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.train.data.overlap import RUN_WORDS, Overlap, separate
from paceline.train.data.split import read_prompts, read_texts

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
DATA = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[4] / "shared" / "data"))
MEASURED = ("mt_bench/question.jsonl", "humaneval/HumanEval.jsonl.gz", "gsm8k/test_first200.jsonl")


def test_a_long_shared_run_is_found_wherever_it_stands() -> None:
    overlap = Overlap([f"Before it, {LONG}; and after."])
    assert overlap.find(f"Something else: {LONG.upper()}!")
    assert overlap.find(" ".join(LONG.split()[:RUN_WORDS]))
    assert overlap.find(" ".join(LONG.split()[: RUN_WORDS - 1])) is None


def test_short_texts_must_be_equal() -> None:
    overlap = Overlap(["What is two and two?"])
    assert overlap.find("what is TWO and two")
    assert overlap.find("What is two and three?") is None
    assert overlap.find("So, what is two and two?") is None


def test_punctuation_and_spaces_hide_nothing() -> None:
    assert Overlap([LONG]).find(LONG.replace(" ", ",\n - "))


def test_texts_are_separated_by_index() -> None:
    assert separate(["a b", LONG, "c"], [LONG, "c!"]) == ([0], [1, 2])
    assert separate(["a"], []) == ([0], [])


@pytest.mark.skipif(not (DATA / "train_prompts").is_dir(), reason="the sets are not here: PACELINE_DATA is their place")
def test_what_is_measured_on_is_not_trained_on() -> None:
    """MT-bench with both turns, HumanEval, and the test set of GSM8K."""
    trained = [prompt.text for prompt in read_prompts(DATA / "train_prompts" / "train_prompts.jsonl.gz")]
    measured = [text for name in MEASURED for text in read_texts(DATA / name)]
    assert len(trained) > 50_000
    assert len(measured) > 400
    assert separate(trained, measured)[1] == []
    assert separate([*trained[:10], measured[0]], measured)[1] == [10], "the check is blind"
