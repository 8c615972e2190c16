"""The n-gram draft on a device, against the reference (which is tested against the drafter itself)."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.kernels import lookup_reference
from paceline.kernels.cuda.lookup import copy_sure, lookup
from paceline.runner.rounds.device_state import DeviceState
from tests.kernels.cuda.conftest import ON_GPU


def check(
    state: DeviceState, seats: torch.Tensor, limits: torch.Tensor, sizes: tuple[int, int], *, predicted: bool = False
) -> torch.Tensor:
    expected = copy.deepcopy(state)
    found, wanted = torch.full_like(seats, -7), torch.full_like(seats, -8)
    given = {"seats": seats, "limits": limits, "min_ngram": sizes[0], "max_ngram": sizes[1], "predicted": predicted}
    lookup(state, **given, found=found, pdl=seats.is_cuda)
    lookup_reference.lookup(expected, **given, found=wanted)
    assert found.tolist() == wanted.tolist()
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.drift, expected.drift)
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


# ── copies over drafts ──


def check_copies(state: DeviceState, seats: torch.Tensor, *given: torch.Tensor, sizes: tuple[int, int]) -> list[int]:
    """`given`: limits, bars and drafts before. Returns the lengths of drafts, whoever made them."""
    limits, sure, drafted = given
    expected = copy.deepcopy(state)
    results = []
    for copied, lanes, pdl in ((copy_sure, state, seats.is_cuda), (lookup_reference.copy_sure, expected, False)):
        found, matches, ahead = drafted.clone(), torch.full_like(seats, -7), torch.full_like(seats, -8)
        options = {"min_ngram": sizes[0], "max_ngram": sizes[1], "matches": matches, "ahead": ahead, "pdl": pdl}
        copied(lanes, seats=seats, limits=limits, sure=sure, found=found, **options)
        results.append([each.tolist() for each in (found, matches, ahead)])
    assert results[0] == results[1]
    assert torch.equal(state.tokens[:-1], expected.tokens[:-1])
    assert torch.equal(state.parents[:-1], expected.parents[:-1])
    return list(results[0][0])


@pytest.mark.parametrize("sizes", [(2, 6), (1, 3), (3, 63)])
@pytest.mark.parametrize("alphabet", [1, 3, 1000])
def test_copies_as_the_reference(sizes: tuple[int, int], alphabet: int, device: torch.device) -> None:
    """Some seats have a tree of the network, some no draft, and for some nobody looks."""
    random, lanes = torch.Generator().manual_seed(alphabet), 24 if ON_GPU else 12
    state = DeviceState(lanes=lanes, width=70, scratch_page=9, device=device, max_draft=16)
    state.tokens[:-1] = torch.randint(0, alphabet, (lanes, 70), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, 60, (lanes,), generator=random).int().to(device)
    state.lengths[:3] = torch.tensor([1, 2, 69], device=device)
    state.parents[:-1] = torch.randint(-1, 3, (lanes, 16), generator=random).int().to(device)
    seats = torch.randperm(lanes + 1, generator=random).int().to(device)
    limits, sure, drafted = (
        torch.randint(0, most, (lanes + 1,), generator=random).int().to(device) for most in (12, 5, 4)
    )
    found = check_copies(state, seats, limits, sure, drafted, sizes=sizes)
    if alphabet == 3:
        assert found != drafted.tolist()
    if alphabet == 1000:
        assert found == drafted.tolist()


def test_a_copy_takes_the_place_of_a_draft_from_its_bar_on(device: torch.device) -> None:
    """Three tokens match: with a bar of three the copy is drafted, with one of four or none the draft stays."""
    for sure, drafted, tokens in ((3, 5, [7, 8, 1, 2, 3, 0]), (4, 2, [50, 51, 0]), (0, 2, [50, 51, 0])):
        state = DeviceState(lanes=1, width=40, scratch_page=9, device=device, max_draft=8)
        state.tokens[0, :10] = torch.tensor([1, 2, 3, 7, 8, 1, 2, 3, 50, 51], device=device)
        state.lengths[0], state.parents[0] = 8, 0
        given = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (5, sure, 2))
        seats = torch.zeros(1, dtype=torch.int32, device=device)
        assert check_copies(state, seats, *given, sizes=(2, 6)) == [drafted]
        assert state.tokens[0, 8 : 8 + len(tokens)].tolist() == tokens
        assert state.parents[0, :3].tolist() == ([-1, 0, 1] if sure == 3 else [0, 0, 0])


# ── predictions ──


def predicting(lanes: int, width: int, device: torch.device) -> DeviceState:
    return DeviceState(lanes=lanes, width=width, scratch_page=9, device=device, predicts=True)


@pytest.mark.parametrize("alphabet", [2, 4, 1000])
def test_predictions_as_the_reference(alphabet: int, device: torch.device) -> None:
    random, lanes = torch.Generator().manual_seed(alphabet), 24 if ON_GPU else 12
    state = predicting(lanes, 70, device)
    state.tokens[:-1] = torch.randint(0, alphabet, (lanes, 70), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, 60, (lanes,), generator=random).int().to(device)
    state.predicted[:-1] = torch.randint(0, alphabet, (lanes, 70), generator=random).int().to(device)
    state.predicted[: lanes // 2] = state.tokens[: lanes // 2].roll(-3, 1)
    state.predicted_lengths[:-1] = torch.randint(0, 70, (lanes,), generator=random).int().to(device)
    state.drift[:-1] = torch.randint(-60, 20, (lanes,), generator=random).int().to(device)
    seats = torch.randperm(lanes + 1, generator=random).int().to(device)
    limits = torch.randint(0, 50, (lanes + 1,), generator=random).int().to(device)
    before = state.drift.clone()
    found = check(state, seats, limits, (1, 6), predicted=True)
    assert found.count_nonzero() > lanes / 4
    assert not torch.equal(state.drift, before)


@pytest.mark.parametrize("place", [6, 1023, 1024, 1027, 2500])
@pytest.mark.parametrize("expected", [0, 1020, 3000])
def test_the_nearest_place_of_a_long_prediction(place: int, expected: int, device: torch.device) -> None:
    state = predicting(1, 3100, device)
    words = torch.arange(6, dtype=torch.int32, device=device)
    state.predicted[0] = torch.arange(3100, dtype=torch.int32, device=device) + 1000
    for end in {place, 2000}:
        state.predicted[0, end - 6 : end] = words
    state.predicted_lengths[0], state.drift[0], state.lengths[0] = 3050, expected - 40, 40
    state.tokens[0, 34:40] = words
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    assert check(state, seats, torch.full_like(seats, 40), (1, 6), predicted=True).tolist() == [40]
    nearest = min(place, 2000, key=lambda end: abs(end - expected))
    assert state.tokens[0, 40:42].tolist() == [nearest + 1000, nearest + 1001]
    assert state.drift.tolist()[0] == nearest - 40


@pytest.mark.parametrize(("own", "drafted"), [(2, [50, 51]), (3, [50, 51]), (4, [60, 61])])
def test_the_longer_match_of_both_texts(own: int, drafted: list[int], device: torch.device) -> None:
    """Three tokens match in the prediction; of as many in the own text the prediction's are drafted."""
    state = predicting(1, 40, device)
    words = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device)
    state.tokens[0, 4 - own : 4] = words[4 - own :]
    state.tokens[0, 4:8] = torch.tensor([60, 61, 62, 63], device=device)
    state.tokens[0, 8:12] = words
    state.predicted[0, :6] = torch.tensor([7, 2, 3, 4, 50, 51], device=device)
    state.lengths[0], state.predicted_lengths[0] = 12, 6
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    assert check(state, seats, torch.full_like(seats, 2), (1, 6), predicted=True).tolist() == [2]
    assert state.tokens[0, 12:14].tolist() == drafted


def test_a_draft_ends_with_the_prediction(device: torch.device) -> None:
    state = predicting(1, 40, device)
    state.tokens[0, :3] = torch.tensor([1, 2, 3], device=device)
    state.predicted[0, :5] = torch.tensor([1, 2, 3, 4, 5], device=device)
    state.lengths[0], state.predicted_lengths[0] = 3, 5
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    assert check(state, seats, torch.full_like(seats, 9), (1, 6), predicted=True).tolist() == [2]
    assert state.tokens[0, 3:7].tolist() == [4, 5, 0, 0]
