"""Filters under the coupled rule: the pass draws without them, and the tokens are those of sampling with them."""

from __future__ import annotations

import pytest

from paceline.engine.judge import judge
from paceline.types import SamplingParams
from tests.engine.filtered_draws import FILTERS, check_best_tokens, check_filters, check_grammars


@pytest.mark.unwatched
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_filters_after_the_pass_give_the_tokens_of_sampling(filters: dict[str, float], temperature: float) -> None:
    redrawn = check_filters(judge, SamplingParams(temperature=temperature, **filters), seeds=40)
    assert redrawn or temperature < 1, "no case in which a filter changed a token"


def test_the_best_token_needs_no_floor() -> None:
    check_best_tokens(judge)


def test_masks_are_for_tokens_that_a_grammar_forbids() -> None:
    check_grammars(judge)
