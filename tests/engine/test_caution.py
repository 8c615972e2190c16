"""Caution: how many rounds of a sequence with a grammar draw with masks, and who always does."""

from __future__ import annotations

import math

import pytest

from paceline.engine.caution import FIRST_ROUNDS, MAX_ROUNDS, Caution, caution_for
from paceline.types import Rule


def masked_rounds(caution: Caution) -> int:
    """Launch rounds until one draws without masks; return how many came before it."""
    count = 0
    while caution.launch():
        count += 1
        assert count < 1000
    return count


def test_an_answer_begins_with_masks() -> None:
    caution = caution_for(filters=False, rule=Rule.COUPLED)
    assert masked_rounds(caution) == FIRST_ROUNDS
    assert masked_rounds(caution) == 0


@pytest.mark.parametrize(("filters", "rule"), [(True, Rule.COUPLED), (False, Rule.THRESHOLD), (False, Rule.TYPICAL)])
def test_draws_that_depend_on_forbidden_tokens_always_have_masks(filters: bool, rule: Rule) -> None:
    caution = caution_for(filters=filters, rule=rule)
    assert all(caution.launch() for _ in range(100))
    assert math.isinf(caution.rounds)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_lossless_rules_are_the_coupled_one_under_a_grammar(rule: Rule) -> None:
    assert masked_rounds(caution_for(filters=False, rule=rule)) == FIRST_ROUNDS


def test_cuts_that_follow_each_other_double_the_rounds_with_masks() -> None:
    caution, rounds = Caution(0), []
    for _ in range(8):
        assert not caution.launch()
        caution.cut()
        rounds.append(masked_rounds(caution))
    assert rounds == [1, 2, 4, 8, MAX_ROUNDS, MAX_ROUNDS, MAX_ROUNDS, MAX_ROUNDS]


@pytest.mark.parametrize(("clean", "rounds"), [(0, 4), (1, 1), (2, 1)])
def test_a_cut_after_a_round_without_one_counts_as_the_first(clean: int, rounds: int) -> None:
    caution = Caution(0)
    caution.cut()
    caution.cut()
    for _ in range(clean):
        caution.passed()
    caution.cut()
    assert masked_rounds(caution) == rounds


def test_a_round_whose_masks_are_missing_is_repeated() -> None:
    caution = Caution(1)
    assert caution.launch()
    caution.repeat()
    assert masked_rounds(caution) == 1
