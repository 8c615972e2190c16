"""How far a block is drafted: by prices, by the drafter's own confidence, by rules, and by the room for rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.block.drafting import BlockDrafting
from paceline.drafters.eagle.drafting import Draws
from paceline.drafters.tree_drafting import Thresholds
from paceline.kernels.noise import pick
from paceline.runner.heads.protocol import Anchor
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Sampler
from paceline.types import Rule, SamplingParams

VOCAB = 12


class Scripted:
    """Implements BlockForward: row i guesses token i + 1, `sharp` nats above the others, after what it was told."""

    device = "cpu"
    ids = torch.arange(VOCAB, dtype=torch.int32)

    def __init__(self, *, sharp: float = 2.0, own: Sequence[float] | None = None) -> None:
        self.sharp, self.own = sharp, own
        self.anchors: list[Anchor] = []
        self.before: list[int] = []

    def blocks(self, anchors: Sequence[Anchor]) -> list[Any]:
        self.anchors = list(anchors)
        return [self for _ in anchors]

    def logits(self, row: int, before: int) -> Tensor:
        self.before.append(before)
        logits = torch.zeros(1, VOCAB)
        logits[0, row + 1] = self.sharp
        return logits

    def best(self, row: int) -> int:
        return row + 1

    def probability(self, logits: Tensor, place: int) -> float:
        return float(logits[0].softmax(0)[place])

    def confidence(self, row: int, before: int) -> float | None:
        return None if self.own is None else self.own[row]

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(logits, inverse_temperatures, keys, ids=self.ids)


def lanes() -> Lanes:
    made = Lanes(count=1, max_context=64, max_draft=8)
    made.pages_np[0, :3] = [4, 2, 7]
    return made


def ask(params: SamplingParams | None = None, **changes: Any) -> Ask:
    params = params or SamplingParams(temperature=0)
    sampler = Sampler(params, seed=1, vocab_size=VOCAB, eos_ids=())
    return replace(Ask(0, 0, np.full(20, 9, dtype=np.int32), 5, sampler), **changes)


def drafted(head: Scripted, wanted: Ask, *, min_confidence: float | None = None) -> Any:
    table = lanes()
    draws = Draws(head, lanes=table, vocab_size=VOCAB, pick=pick)
    thresholds = Thresholds(min_confidence, next_acceptance=1.0)
    made = BlockDrafting(head, lanes=table, draws=draws, thresholds=thresholds)
    return made.draft([wanted])[0]


def test_a_block_begins_with_the_last_committed_token() -> None:
    head = Scripted()
    draft = drafted(head, ask())
    assert head.anchors == [Anchor(token=9, position=19, pages=[4, 2], tokens=5)]
    assert draft.tokens == (1, 2, 3, 4, 5)
    assert head.before == [9, 1, 2, 3, 4]
    assert draft.passes == 1
    assert draft.problem(vocab_size=VOCAB, max_length=5) is None


@pytest.mark.parametrize(("price", "count"), [(0.0, 5), (0.05, 4), (0.2, 2), (0.6, 0)])
def test_tokens_are_drafted_that_pay_for_their_row(price: float, count: int) -> None:
    head = Scripted(own=[0.5] * 5)
    assert len(drafted(head, ask(price=0.9, row_price=price)).tokens) == count
    assert len(head.before) == count, "no logits are computed for a row that does not pay"


def test_each_row_has_its_own_price() -> None:
    rows = (0.0, 0.9, 0.0)
    assert len(drafted(Scripted(own=[0.5] * 5), ask(row_price=0.01, row_prices=rows)).tokens) == 1
    assert len(drafted(Scripted(own=[0.9] * 5), ask(row_price=0.6, row_prices=(0.1, 0.1))).tokens) == 4


def test_confidence_is_that_of_the_whole_path() -> None:
    draft = drafted(Scripted(own=[0.5, 0.8, 1.0, 0.5, 0.5]), ask(max_draft=3))
    assert draft.confidence == pytest.approx((0.5, 0.4, 0.4))


def test_without_its_own_confidence_it_follows_the_probability() -> None:
    sure, unsure = (drafted(Scripted(sharp=sharp), ask(row_price=0.3)) for sharp in (9.0, 2.0))
    assert len(sure.tokens) > len(unsure.tokens)
    assert all(each >= 0.3 for each in (*sure.confidence, *unsure.confidence))


def test_a_request_or_the_user_may_set_the_limit() -> None:
    halves = [0.5] * 5
    assert len(drafted(Scripted(own=halves), ask(row_price=0.9), min_confidence=0.0).tokens) == 5
    assert len(drafted(Scripted(own=halves), ask(p_min=0.3), min_confidence=0.0).tokens) == 1


def test_a_token_drawn_for_a_rule_with_distributions_stays() -> None:
    """If it were left out for what it is, the distribution would be another one."""
    params = SamplingParams(temperature=1.0)
    draft = drafted(Scripted(sharp=0.0), ask(params, rule=Rule.REJECTION, row_price=0.99))
    assert len(draft.tokens) == 1
    assert draft.probs.shape == (1, VOCAB)
    assert draft.problem(vocab_size=VOCAB, max_length=5) is None
    coupled = drafted(Scripted(sharp=0.0), ask(params, row_price=0.99))
    assert coupled.tokens == ()


def test_each_row_is_drawn_with_the_targets_noise_at_its_position() -> None:
    params = SamplingParams(temperature=1.0)
    head, wanted = Scripted(sharp=0.0), ask(params)
    draft = drafted(head, wanted, min_confidence=0.0)
    positions = np.arange(20, 25)
    assert list(draft.tokens) == wanted.sampler.draw(torch.zeros(5, VOCAB), positions, pick).tolist()
    assert head.before == [9, *draft.tokens[:-1]]


def test_a_rule_that_asks_for_confidence_gets_that_of_the_tokens() -> None:
    draft = drafted(Scripted(sharp=2.0), ask(rule=Rule.CONFIDENCE))
    probability = float(torch.softmax(Scripted().logits(0, 0), -1)[0, 1])
    assert draft.confidence[1] == pytest.approx(probability**2)
