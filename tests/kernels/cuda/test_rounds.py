"""Layout, acceptance and pushing on a device against the reference, over random states."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.kernels import round_reference
from paceline.kernels.cuda import rounds
from paceline.runner.rounds.device_state import DeviceState


def random_state(random: torch.Generator, device: torch.device, *, lanes: int, width: int = 50) -> DeviceState:
    state = DeviceState(lanes=lanes, width=width, scratch_page=500, device=device)
    state.tokens[:-1] = torch.randint(0, 2, (lanes, width), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, width - 9, (lanes,), generator=random).int().to(device)
    state.pages[:-1] = torch.randint(0, 500, (lanes, state.pages.shape[1]), generator=random).int().to(device)
    state.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (lanes + 1,), generator=random))
    return state


def random_seats(random: torch.Generator, state: DeviceState, count: int) -> Tensor:
    """Different lanes in any order, the last few seats on the dummy."""
    seats = torch.randperm(state.dummy, generator=random)[:count].int()
    seats[max(count - 2, 1) :] = state.dummy
    return seats.to(state.device)


def same_state(one: DeviceState, other: DeviceState) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)


@pytest.mark.parametrize(("seats", "rows"), [(1, 1), (1, 7), (5, 5), (5, 17), (13, 100), (64, 70)])
@pytest.mark.parametrize("first", [-2, -1, 3])
def test_layout(seats: int, rows: int, first: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seats * 1000 + rows + first)
    state = random_state(random, device, lanes=80)
    state.lengths[:40] = 1
    chosen = random_seats(random, state, seats)
    counts = torch.randint(1, 7, (seats,), generator=random).int().to(device)
    results = []
    for layout in (partial(rounds.layout, pdl=device.type == "cuda"), round_reference.layout):
        out = {
            name: torch.full((rows,), -7, dtype=torch.int32, device=device)
            for name in ("tokens", "positions", "slots", "owners")
        }
        out["row_starts"] = torch.full((seats + 1,), -7, dtype=torch.int32, device=device)
        mine = counts.clone()
        layout(state, seats=chosen, counts=mine, first=first, **out)
        results.append({name: tensor.tolist() for name, tensor in out.items()} | {"counts": mine.tolist()})
    assert results[0] == results[1]
    assert results[0]["row_starts"][-1] <= rows


def test_layout_stays_inside_its_lane(device: torch.device) -> None:
    """A row past the width is the last position, not a neighbour's token."""
    state = random_state(torch.Generator().manual_seed(1), device, lanes=3)
    state.lengths[0] = 49
    out = {
        name: torch.zeros(4, dtype=torch.int32, device=device) for name in ("tokens", "positions", "slots", "owners")
    }
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    seats, counts = torch.zeros_like(starts[:1]), torch.full_like(starts[:1], 4)
    rounds.layout(state, seats=seats, counts=counts, first=-1, row_starts=starts, **out)
    assert out["positions"].tolist() == [48, 49, 49, 49]


@pytest.mark.parametrize(("seats", "longest"), [(1, 0), (1, 4), (9, 1), (30, 5), (30, 8)])
@pytest.mark.parametrize("synthetic", [0.0, 0.7, 1.0])
def test_accept(seats: int, longest: int, synthetic: float, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seats * 10 + longest)
    state = random_state(random, device, lanes=40)
    expected = copy.deepcopy(state)
    chosen = random_seats(random, state, seats)
    row_starts = torch.zeros(seats + 1, dtype=torch.int32)
    row_starts[1:] = torch.randint(1, longest + 2, (seats,), generator=random).cumsum(0)
    row_starts = row_starts.to(device)
    targets = torch.randint(0, 2, (seats * (longest + 1),), generator=random).int().to(device)
    out = torch.full((seats, 2 + 2 * (longest + 1)), -7, dtype=torch.int32, device=device)
    wanted = torch.full_like(out, -8)
    given = {"seats": chosen, "row_starts": row_starts, "targets": targets}
    rounds.accept(state, **given, out=out, synthetic_acceptance=synthetic, pdl=device.type == "cuda")
    round_reference.accept(expected, **given, out=wanted, synthetic_acceptance=synthetic)
    assert out.tolist() == wanted.tolist()
    assert same_state(state, expected)
    if synthetic == 1.0:
        assert torch.equal(out[:, 0], out[:, 1])


def test_verdicts_of_other_rules(device: torch.device) -> None:
    """They decide for their seats, also if the target's own tokens agree or the token after is the drafted one."""
    random = torch.Generator().manual_seed(3)
    state = random_state(random, device, lanes=9)
    expected = copy.deepcopy(state)
    chosen = random_seats(random, state, 6)
    given = {
        "seats": chosen,
        "row_starts": (torch.arange(7, dtype=torch.int32) * 4).to(device),
        "targets": torch.randint(0, 2, (24,), generator=random).int().to(device),
        "verdicts": torch.tensor([[0, 1], [-1, -1], [3, 0], [2, 1], [-1, 5], [1, 1]], dtype=torch.int32, device=device),
    }
    out = torch.full((6, 10), -7, dtype=torch.int32, device=device)
    wanted = torch.full_like(out, -8)
    rounds.accept(state, **given, out=out, pdl=device.type == "cuda")
    round_reference.accept(expected, **given, out=wanted)
    assert out.tolist() == wanted.tolist()
    assert same_state(state, expected)
    assert out[[0, 2, 3], 0].tolist() == [0, 3, 2]
    assert [int(out[seat, 2 + out[seat, 0]]) for seat in (0, 2, 3)] == [1, 0, 1]


def test_the_end_of_a_prompt(device: torch.device) -> None:
    random = torch.Generator().manual_seed(5)
    state = random_state(random, device, lanes=9)
    expected = copy.deepcopy(state)
    chosen = random_seats(random, state, 5)
    roots = torch.tensor([6, 0, 3, 2, 2], dtype=torch.int32, device=device)
    targets = torch.arange(100, 107, dtype=torch.int32, device=device)
    out = torch.full((5, 8), -7, dtype=torch.int32, device=device)
    wanted = torch.full_like(out, -8)
    rounds.accept(state, seats=chosen, roots=roots, targets=targets, out=out)
    round_reference.accept(expected, seats=chosen, roots=roots, targets=targets, out=wanted)
    assert out.tolist() == wanted.tolist()
    assert out[0, :4].tolist() == [0, 0, 106, 0]
    assert same_state(state, expected)


@pytest.mark.parametrize("offset", [0, 3, 12])
def test_push(offset: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(offset)
    state = random_state(random, device, lanes=20)
    state.lengths[5] = 47
    expected = copy.deepcopy(state)
    chosen = random_seats(random, state, 17)
    tokens = torch.arange(50, 67, dtype=torch.int32, device=device)
    rounds.push(state, seats=chosen[:-1], tokens=tokens[:-1], offset=offset)
    round_reference.push(expected, seats=chosen[:-1], tokens=tokens[:-1], offset=offset)
    assert same_state(state, expected)
    assert (state.tokens >= 50).sum() > 10
