"""Who says how long a draft is: the engine by how the last ones fared, or a drafter that knows how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.cost import CostModel
from paceline.engine.governor import PRIOR_PRICE, PRIOR_ROW_PRICE
from paceline.types import Request, SamplingParams
from tests.rig import build
from tests.rig_drafters import always
from tests.runs import prompt, run


class Wrong(NgramDrafter):
    """One token that is hardly ever right, however long the draft may be."""

    name = "wrong"

    def __init__(self, *, ends_drafts: bool) -> None:
        super().__init__()
        self.ends_drafts = ends_drafts
        self.asks: list[Ask] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asks += asks
        return [Draft(tokens=(1,)) for _ in asks]


def asks_of(drafter: Wrong, **options: object) -> list[Ask]:
    rig = build("toy", {"wrong": always(drafter)}, min_acceptance=0.0, **options)
    run(rig, [Request(id="a", prompt=prompt(5, seed=1), sampling=SamplingParams(temperature=0, max_tokens=40))])
    return drafter.asks[:6]


def test_a_drafter_that_ends_its_drafts_is_asked_for_as_much_as_there_may_be() -> None:
    assert {ask.max_draft for ask in asks_of(Wrong(ends_drafts=True))} == {8}
    assert max(ask.max_draft for ask in asks_of(Wrong(ends_drafts=False))[2:]) < 8


@pytest.mark.parametrize(
    ("options", "told"), [({"measure_cost": True}, 0.25), ({}, 0.0), ({"measure_cost": True, "fixed_draft": True}, 0.0)]
)
def test_it_is_told_what_a_token_costs_where_costs_count(
    options: dict[str, bool], told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "price", lambda self, drafter: 0.25)
    monkeypatch.setattr(CostModel, "entry", lambda self, drafter: 0.0)
    asks = asks_of(Wrong(ends_drafts=True), **options)
    assert {(ask.price, ask.max_draft) for ask in asks} == {(told, 8)}


def test_it_is_told_something_before_anything_is_measured() -> None:
    """Else its first drafts would all be as long as may be, and no row's cost could be told from another's."""
    asks = asks_of(Wrong(ends_drafts=True), measure_cost=True)
    assert (asks[0].price, asks[0].row_price) == (PRIOR_PRICE, PRIOR_ROW_PRICE)
    assert 0 < PRIOR_ROW_PRICE < PRIOR_PRICE < 0.2
