"""Prompts that defeat drafters: made by a seed, and of the kinds that they are called."""

from __future__ import annotations

import base64

from paceline.prompts.hard import HARD, SCRIPTS, TOPICS, hard_prompts


def test_a_seed_gives_the_same_prompts() -> None:
    for kind in HARD:
        made = hard_prompts(kind, count=6, seed=1)
        assert made == hard_prompts(kind, count=6, seed=1)
        assert made != hard_prompts(kind, count=6, seed=2)
        assert [each.id for each in made] == [f"{kind}/{i}" for i in range(6)]


def test_scripts_are_others() -> None:
    assert SCRIPTS.keys() == TOPICS.keys()
    for each in hard_prompts("scripts", count=2 * len(SCRIPTS), seed=0):
        letters = [letter for letter in each.text if letter.isalpha()]
        assert not any(letter.isascii() for letter in letters)
        assert "{" not in each.text


def test_base64_is_that() -> None:
    for each in hard_prompts("base64", count=4, seed=0):
        assert len(base64.b64decode(each.text.split("\n\n")[1], validate=True)) >= 48
