"""A teacher is asked once for every exchange where there is room for what it said, else each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import pad
from paceline.train.data.state_cache import RoundedRows, StateCache
from paceline.train.data.teacher import TargetStates

LENGTHS = (5, 17, 9, 30)
BATCHES = ([0, 1], [2, 3], [1, 3], [0, 2], [3, 0])


class Counting:
    """What it thinks of a token depends on the token and its place."""

    asked = 0

    def __call__(self, ids: Tensor) -> TargetStates:
        self.asked += 1
        features = torch.stack([ids.float() + torch.arange(ids.shape[1]), ids.float() * 2], dim=-1)
        return TargetStates(features=features, hidden=features[..., :1] * 3)


def exchanges() -> list[Exchange]:
    random = np.random.default_rng(1)
    return [Exchange(random.integers(1, 50, n).astype(np.int32), 2) for n in LENGTHS]


WHOLE, ROUNDED = sum(LENGTHS) * (2 + 1) * 4, sum(LENGTHS) * (2 + 2 + 4)  # bytes; 8 bits a feature and one scale


@pytest.mark.parametrize(
    ("room", "asked", "coarse"),
    [(WHOLE, 2, 0), (WHOLE - 1, 2, 1), (ROUNDED, 2, 1), (ROUNDED - 1, len(BATCHES), 0)],
)
def test_remembered_while_there_is_room(room: int, asked: int, coarse: int) -> None:
    teacher: Any = Counting()
    cache, texts = StateCache(teacher, exchanges(), max_bytes=room), exchanges()
    apart = 0.0
    for number, batch in enumerate(BATCHES):
        some = pad([texts[index] for index in batch])
        found, wanted = cache(batch, some), Counting()(some.ids)
        inside = torch.arange(some.ids.shape[1]) < some.ends[:, None]
        assert torch.equal(found.hidden[inside], wanted.hidden[inside])
        assert found.features.shape == wanted.features.shape
        assert found.features.dtype == wanted.features.dtype
        apart = max(apart, (found.features - wanted.features)[inside].abs().max().item())
        if number < 2:
            assert apart == 0.0, "what was never seen is the teacher's own"
    assert teacher.asked == asked
    assert (0.0 < apart < 1.0) if coarse else apart == 0.0  # of values up to 100


def test_8_bits_do_for_columns_of_all_sizes() -> None:
    """A column a thousand times larger than its neighbours, and one that is so at one place alone."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn((400, 96), generator=random)
    rows[:, 5] *= 1000.0
    rows[0, 7] = 1000.0
    kept = RoundedRows(len(rows), rows)
    kept.put(torch.arange(400), rows)
    error = (kept.at(torch.arange(400)) - rows)[1:].square().mean(dim=0).sqrt() / rows[1:].square().mean(dim=0).sqrt()
    assert error[7] < 0.05
    assert error[torch.arange(96) != 7].max() < 0.02
