"""A teacher is asked once for every exchange where there is room for what it said, else each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.train.answers import Exchange
from paceline.train.batches import pad
from paceline.train.insights import Insights
from paceline.train.teacher import Insight

LENGTHS = (5, 17, 9, 30)
BATCHES = ([0, 1], [2, 3], [1, 3], [0, 2], [3, 0])


class Counting:
    """What it thinks of a token depends on the token and its place."""

    asked = 0

    def __call__(self, ids: Tensor) -> Insight:
        self.asked += 1
        features = torch.stack([ids.float() + torch.arange(ids.shape[1]), ids.float() * 2], dim=-1)
        return Insight(features=features, hidden=features[..., :1] * 3)


def exchanges() -> list[Exchange]:
    random = np.random.default_rng(1)
    return [Exchange(random.integers(1, 50, n).astype(np.int32), 2) for n in LENGTHS]


@pytest.mark.parametrize(("room", "asked"), [(sum(LENGTHS) * 3 * 4, 2), (sum(LENGTHS) * 3 * 4 - 1, len(BATCHES))])
def test_remembered_while_there_is_room(room: int, asked: int) -> None:
    teacher: Any = Counting()
    insights, texts = Insights(teacher, exchanges(), room=room), exchanges()
    for batch in BATCHES:
        some = pad([texts[index] for index in batch])
        found, wanted = insights(batch, some), Counting()(some.ids)
        inside = torch.arange(some.ids.shape[1]) < some.ends[:, None]
        assert torch.equal(found.features[inside], wanted.features[inside])
        assert torch.equal(found.hidden[inside], wanted.hidden[inside])
        assert found.features.shape == wanted.features.shape
    assert teacher.asked == asked
