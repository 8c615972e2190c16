"""The n-gram draft on a device, against the reference (which is tested against the drafter itself)."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.kernels import round_reference
from paceline.kernels.cuda.lookup import lookup
from paceline.runner.rounds.device_state import DeviceState
from tests.kernels.cuda.conftest import ON_GPU


def check(state: DeviceState, seats: torch.Tensor, limits: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    expected = copy.deepcopy(state)
    found, wanted = torch.full_like(seats, -7), torch.full_like(seats, -8)
    given = {"seats": seats, "limits": limits, "min_ngram": sizes[0], "max_ngram": sizes[1]}
    lookup(state, **given, found=found, pdl=seats.is_cuda)
    round_reference.lookup(expected, **given, found=wanted)
    assert found.tolist() == wanted.tolist()
    assert torch.equal(state.tokens, expected.tokens)
    return found


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 6), (1, 64)])
@pytest.mark.parametrize("alphabet", [1, 3, 1000])
def test_as_the_reference(sizes: tuple[int, int], alphabet: int, device: torch.device) -> None:
    random, lanes = torch.Generator().manual_seed(alphabet), 24 if ON_GPU else 12
    state = DeviceState(lanes=lanes, width=70, scratch_page=9, device=device)
    state.tokens[:-1] = torch.randint(0, alphabet, (lanes, 70), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, 60, (lanes,), generator=random).int().to(device)
    state.lengths[:3] = torch.tensor([1, 2, 69], device=device)
    seats = torch.randperm(lanes + 1, generator=random).int().to(device)
    limits = torch.randint(0, 12, (lanes + 1,), generator=random).int().to(device)
    found = check(state, seats, limits, sizes)
    if alphabet == 3 and sizes[0] == 1:
        assert found.count_nonzero() > lanes / 3


@pytest.mark.parametrize("place", [3, 1022, 1023, 1024, 1025, 2500])
def test_the_latest_place_of_a_long_history(place: int, device: torch.device) -> None:
    """The same six tokens at the beginning, at `place`, which may lie across a border of programs, and at the end."""
    state = DeviceState(lanes=2, width=3100, scratch_page=9, device=device)
    state.tokens[0] = torch.arange(3100, dtype=torch.int32, device=device) + 1000
    words = torch.arange(6, dtype=torch.int32, device=device)
    for start in {0, place} if place > 6 else {place}:
        state.tokens[0, start : start + 6] = words
    state.lengths[0] = 3050
    state.tokens[0, 3044:3050] = words
    seats = torch.tensor([0, state.dummy], dtype=torch.int32, device=device)
    found = check(state, seats, torch.full_like(seats, 40), (1, 6))
    assert found.tolist() == [40, 0]
    assert state.tokens[0, 3050:3053].tolist() == [place + 1006, place + 1007, place + 1008]


def test_the_longest_suffix_wins_over_the_latest(device: torch.device) -> None:
    state = DeviceState(lanes=1, width=40, scratch_page=9, device=device)
    state.tokens[0, :9] = torch.tensor([1, 2, 3, 7, 3, 8, 1, 2, 3], device=device)
    state.lengths[0] = 9
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    check(state, seats, torch.full_like(seats, 2), (1, 3))
    assert state.tokens[0, 9:12].tolist() == [7, 3, 0]


def test_a_loop_is_drafted_as_a_loop(device: torch.device) -> None:
    state = DeviceState(lanes=1, width=99, scratch_page=9, device=device)
    state.tokens[0, :7] = torch.tensor([9, 1, 2, 3, 1, 2, 3], device=device)
    state.lengths[0] = 7
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    check(state, seats, torch.full_like(seats, 50), (2, 3))
    assert state.tokens[0, 7:57].tolist() == ([1, 2, 3] * 17)[:50]
    assert state.tokens[0, 57:].count_nonzero() == 0
