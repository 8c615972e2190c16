"""Hidden states that are held for a head: kernels against their definition, ragged and full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from paceline.kernels import states_reference
from paceline.kernels.cuda import states
from paceline.kernels.states_reference import HeldStates, Taken
from paceline.runner.rounds.device_state import DeviceState

LANES, WIDTH, CAPACITY = 6, 40, 4


def lanes_of(device: torch.device) -> DeviceState:
    state = DeviceState(lanes=LANES, width=64, scratch_page=30, device=device)
    random = torch.Generator().manual_seed(1)
    state.tokens.copy_(torch.randint(1, 90, state.tokens.shape, generator=random))
    state.pages[:-1] = torch.arange(LANES * state.pages.shape[1], device=device).view(LANES, -1).int()
    state.lengths[:-1] = torch.tensor([9, 2, 30, 17, 40, 12], device=device)
    return state


def no_states(device: torch.device) -> HeldStates:
    table = torch.zeros((2, LANES + 1), dtype=torch.int32, device=device)
    return HeldStates.empty(table, capacity=CAPACITY, width=WIDTH, dtype=torch.float32)


def held_by_both(device: torch.device) -> Iterator[tuple[str, DeviceState, HeldStates]]:
    """Steps with several accepted tokens, more than there is room for, plain ones, and a gap."""
    generator = torch.Generator().manual_seed(2)
    features = [torch.randn((24, WIDTH), generator=generator).to(device) for _ in range(3)]
    for kind, hold in (("kernel", states.hold), ("reference", states_reference.hold)):
        state, held = lanes_of(device), no_states(device)
        seats = torch.tensor([3, 0, LANES, 2, 1], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 6, 7, 8, 14, 15], dtype=torch.int32, device=device)
        for turn, accepted in enumerate([[2, 0, 0, 5, 0], [0, 1, 0, 0, 0], [1, 0, 0, 2, 0]]):
            out = torch.zeros((5, 2 + 2 * 6), dtype=torch.int32, device=device)
            out[:, 0] = torch.tensor(accepted, device=device)
            state.lengths[seats[[0, 1, 3, 4]].long()] += 1 + out[[0, 1, 3, 4], 0]
            if turn == 1:
                state.lengths[1] += 1  # a step that held nothing
            read = torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32, device=device) if turn == 2 else None
            hold(held, state, seats=seats, starts=starts, outcomes=out, features=features[turn], read=read)
        yield kind, state, held


def test_hold(device: torch.device) -> None:
    (_, _, mine), (_, state, wanted) = held_by_both(device)
    for name in ("states", "ends", "counts"):
        assert torch.equal(getattr(mine, name), getattr(wanted, name)), name
    assert wanted.counts.tolist() == [1, 2, 4, 4, 0, 0, 0]  # lane 0 was read, lane 1 has a gap, lanes 2 and 3 are full
    assert wanted.ends[:4].tolist() == (state.lengths[:4] - 1).tolist()


@pytest.mark.parametrize(("rows", "most", "wanted"), [(20, 9, [4, 4, 2]), (20, 3, [3, 3, 2]), (7, 9, [2, 1, 1])])
@pytest.mark.parametrize("turns", [0, 3])
def test_take(rows: int, most: int, wanted: list[int], turns: int, device: torch.device) -> None:
    """Too few rows cost the oldest states; a seat that does not draft, one without states and a dummy have none."""
    found = []
    seats = torch.tensor([2, 5, LANES, 0, 3, 1], dtype=torch.int32, device=device)
    limits = torch.tensor([3, 3, 3, 0, 2, 1], dtype=torch.int32, device=device)
    for kind, state, held in held_by_both(device):
        features = torch.full((rows, WIDTH), 7.0, device=device)
        into = Taken.empty(seats=len(seats), rows=rows, turns=turns, features=features, device=device)
        take = states.take if kind == "kernel" else states_reference.take
        take(held, state, seats=seats, limits=limits, most=most, into=into)
        found.append(into)
    for field in fields(Taken):
        assert torch.equal(*(getattr(each, field.name) for each in found)), field.name
    counts = found[0].row_starts.diff().tolist()
    assert counts == [wanted[0], 0, 0, 0, *wanted[1:]]
    assert found[0].confidence.tolist() == [1, -1, -1, -1, 1, 1]


def test_keep(device: torch.device) -> None:
    x = torch.randn((5, 37), device=device)
    kept = torch.zeros((5, 3 * 37), device=device)
    states.keep(x, kept, 1)
    assert torch.equal(kept[:, 37:74], x)
    assert not kept[:, :37].any()
    assert not kept[:, 74:].any()
