"""Growth of trees on a device against the reference, level by level."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.draft import Draft
from paceline.kernels import growth_reference
from paceline.kernels.cuda import branch as device_branch
from paceline.kernels.cuda import growth as device_growth
from paceline.kernels.growth_reference import Growth
from paceline.runner.rounds.device_state import DeviceState
from tests.kernels.cuda.conftest import ON_GPU

MOST = 9


def lanes(device: torch.device) -> DeviceState:
    state = DeviceState(lanes=6, width=60, scratch_page=99, device=device, max_draft=MOST)
    state.lengths[:-1] = torch.tensor([3, 17, 20, 5, 16, 44])
    state.pages[:-1] = torch.arange(6 * state.pages.shape[1]).view(6, -1)
    state.inverse_temperature[:-1] = torch.tensor([0.0, 1.0, 1 / 0.7, 0.0, 1.0, 0.5])
    state.seed.copy_(torch.arange(7) * 7919)
    return state


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("width", "levels", "vocab"), [(1, 3, 40), (2, 4, 9000), (3, 3, 700), (4, 2, 5000), (3, 1, 50)]
)
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_trees_of_any_size(width: int, levels: int, vocab: int, kind: str, device: torch.device) -> None:
    """Seats without a draft, with few nodes, and with confidence enough for few; a vocabulary of the head's own."""
    random = torch.Generator().manual_seed(width * 10 + levels)
    state = lanes(device)
    expected = copy.deepcopy(state)
    seats = torch.tensor([1, 0, 5, 2, 4, 3, state.dummy], dtype=torch.int32, device=device)
    count, shared = len(seats), kind == "medusa"
    ids = (torch.randperm(2 * vocab, generator=random)[:vocab]).sort().values.int().to(device)
    mine, right = (Growth.empty(seats=count, width=width, levels=levels, device=device) for _ in range(2))
    shape = {
        "roots": torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0], device=device),
        "ends": torch.tensor([0, 2, 3, 5, 5, 8, 9, 9], dtype=torch.int32, device=device),
        "thresholds": torch.tensor([0.0, 0.0, 0.02, 0.0, 0.3, 1.5, 0.0], device=device),
        "limits": torch.tensor([8, 9, 7, 9, 5, 4, 0], dtype=torch.int32, device=device),
    }
    for level in range(levels):
        rows = count if level == 0 or shared else count * width
        logits = torch.randn((rows, vocab), generator=random).to(device) * 4
        logits[0, 3] = float("nan")
        given = {"seats": seats, "level": level, "ids": None if shared else ids, "fitted": not shared}
        device_branch.branch(logits, state, mine, **given, pdl=ON_GPU)
        growth_reference.branch(logits, expected, right, **given)
        given = {"seats": seats, "level": level, "shared": shared, **shape}
        device_growth.grow(state, mine, **given, vocab=vocab, fitted=not shared, pdl=ON_GPU)
        growth_reference.grow(expected, right, **given)
        torch.testing.assert_close(mine.confidence, right.confidence, rtol=1e-3, atol=1e-3)
        for name in ("chosen", "row_tokens", "positions", "slots", "ends", "bases"):
            assert getattr(mine, name).tolist() == getattr(right, name).tolist(), (level, name)
        if level + 1 < levels:
            read = (right.chosen >= 0).flatten()
            tails = (growth.tails[(level + 1) % 2, read, : level + 1].tolist() for growth in (mine, right))
            assert next(tails) == next(tails)
        there = right.confidence >= 0
        for name in ("tokens", "parents"):
            assert torch.equal(getattr(mine, name)[there], getattr(right, name)[there])
        right.confidence.copy_(mine.confidence)  # rounding must not change an order of equals below
    found, wanted = (torch.full((count,), -7, dtype=torch.int32, device=device) for _ in range(2))
    device_growth.prune(state, mine, seats=seats, limits=shape["limits"], found=found, pdl=ON_GPU)
    growth_reference.prune(expected, right, seats=seats, limits=shape["limits"], found=wanted)
    assert found.tolist() == wanted.tolist()
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.parents, expected.parents)
    assert [found[3].item(), found[5].item(), found[6].item()] == [0, 1, 0]
    for seat, lane in enumerate(seats.tolist()):
        number, length = int(found[seat]), int(state.lengths[lane])
        tokens, parents = state.tokens[lane, length:][:number].tolist(), state.parents[lane, :number].tolist()
        assert Draft(tuple(tokens), tuple(parents)).problem(vocab_size=2 * vocab, max_length=MOST) is None
