"""Rounds replayed over answers, and the numbers made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.train.data.batches import TextBatch
from paceline.train.loop.score import Score, reaches, replay


def test_rounds_are_replayed_as_the_engine_would() -> None:
    """The answer is tokens 4 … 13; token 4 comes with the prompt. Reach is by the row before the last committed."""
    reach = np.zeros(16, dtype=int)
    reach[3], reach[6], reach[7], reach[12] = 2, 0, 4, 4
    # last = 4: row 3 → 2 accepted, last = 7: row 6 → 0, last = 8: row 7 → 4, last = 13: the end
    assert replay(reach, start=4, end=14).tolist() == [2, 0, 4]


def test_nothing_is_accepted_beyond_the_end() -> None:
    assert replay(np.full(16, 4), start=4, end=8).tolist() == [3]
    assert replay(np.full(16, 4), start=4, end=5).tolist() == []


def test_reach_ends_at_the_first_wrong_guess() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    texts = TextBatch(ids=ids, starts=torch.tensor([1]), ends=torch.tensor([6]))
    guesses = torch.zeros((1, 6, 3), dtype=torch.long)
    guesses[0, 0] = torch.tensor([7, 8, 9])
    guesses[0, 1] = torch.tensor([8, 0, 10])
    guesses[0, 2] = torch.tensor([0, 10, 0])
    assert reaches(guesses, texts)[0, :3].tolist() == [3, 1, 0]


def test_scores_say_how_often_each_position_was_right() -> None:
    score = Score(draft=3, rounds=10, accepted=(8, 4, 1))
    assert score.tokens_per_round == pytest.approx(2.3)
    assert score.by_position == pytest.approx((0.8, 0.5, 0.25))
    assert Score(draft=2, rounds=0, accepted=(0, 0)).tokens_per_round == 1.0
