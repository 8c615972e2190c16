"""Offers on a device, against the reference; and the reference against cases made by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from paceline.kernels import offer_reference
from paceline.kernels.cuda.offer import offer
from paceline.kernels.offer_reference import HEADER
from paceline.runner.rounds.device_state import DeviceState

TEXT = [11, 12, 13, 14, 15, 16]


def check(state: DeviceState, seats: torch.Tensor, offers: torch.Tensor) -> list[int]:
    """Return the rows of each seat, which has asked for 7 without an offer."""
    expected = copy.deepcopy(state)
    counts, wanted = torch.full_like(seats, 7), torch.full_like(seats, 7)
    offer(state, seats=seats, offers=offers, counts=counts, pdl=seats.is_cuda)
    offer_reference.offer(expected, seats=seats, offers=offers, counts=wanted)
    assert counts.tolist() == wanted.tolist()
    assert torch.equal(state.tokens, expected.tokens)
    return counts.tolist()


def lane_of(text: Sequence[int], device: torch.device, width: int = 20) -> DeviceState:
    state = DeviceState(lanes=1, width=width, scratch_page=9, device=device)
    state.tokens[0, : len(text)] = torch.tensor(text, device=device)
    state.lengths[0] = len(text)
    return state


@pytest.mark.parametrize(
    ("most", "start", "tokens", "draft"),
    [
        pytest.param(4, 6, (1, 2, 3), (1, 2, 3), id="nothing in flight"),
        pytest.param(2, 6, (1, 2, 3), (1, 2), id="limited"),
        pytest.param(4, 4, (15, 16, 3, 4), (3, 4), id="behind what was accepted"),
        pytest.param(4, 4, (15, 17, 3, 4), (), id="different at its end"),
        pytest.param(4, 3, (13, 15, 16, 4), (), id="different at its beginning"),
        pytest.param(4, 3, (14, 15), (), id="too short"),
        pytest.param(4, 4, (15, 16), (), id="used up"),
        pytest.param(4, 7, (1, 2, 3), (), id="from beyond the end"),
    ],
)
def test_one_seat(most: int, start: int, tokens: Sequence[int], draft: Sequence[int], device: torch.device) -> None:
    state = lane_of(TEXT, device)
    offers = torch.zeros((1, HEADER + 5), dtype=torch.int32, device=device)
    offers[0, : HEADER + len(tokens)] = torch.tensor([most, start, len(tokens), 0, *tokens], device=device)
    assert check(state, torch.zeros(1, dtype=torch.int32, device=device), offers) == [1 + len(draft)]
    written = tokens[len(TEXT) - start :] if draft else ()  # more than the draft, where it is limited
    assert state.tokens[0].tolist() == [*TEXT, *written, *[0] * (14 - len(written))]
    assert tuple(written[: len(draft)]) == draft
    assert int(state.lengths[0]) == len(TEXT)


def test_a_lane_is_never_overrun(device: torch.device) -> None:
    state = lane_of(TEXT, device, width=8)
    offers = torch.tensor([[5, 6, 5, 0, 1, 2, 3, 4, 5]], dtype=torch.int32, device=device)
    assert check(state, torch.zeros(1, dtype=torch.int32, device=device), offers) == [3]
    assert state.tokens[0].tolist() == [*TEXT, 1, 2]


@pytest.mark.parametrize(
    ("start", "tokens", "draft"),
    [
        pytest.param(5, (15, 16, 3, 4), (3, 4), id="a token was left out"),
        pytest.param(4, (16, 3, 4, 5), (3, 4, 5), id="a token was added"),
        pytest.param(4, (15, 17, 3, 4), (), id="a token was changed"),
        pytest.param(5, (15, 17, 16, 3), (3,), id="other tokens were between them"),
        pytest.param(5, (9, 16, 15, 16, 2), (2,), id="the longest match"),
        pytest.param(4, (9, 16, 1, 16, 2), (1, 16, 2), id="the nearest match"),
        pytest.param(3, (9, 16, 9, 16, 2), (2,), id="the later of two"),
        pytest.param(5, (9, 9, 9, 9, 16, 1), (), id="too far"),
        pytest.param(5, (9, 9, 14, 15, 16, 1), (1,), id="far and long"),
        pytest.param(5, (9, 9, 16), (), id="at the end of the offer"),
        pytest.param(7, (1, 16, 3), (), id="from beyond the end"),
    ],
)
def test_an_offer_goes_on_behind_an_edit(
    start: int, tokens: Sequence[int], draft: Sequence[int], device: torch.device
) -> None:
    """The last tokens are looked for in an offer that differs, within three tokens of where it was expected."""
    state = lane_of(TEXT, device)
    offers = torch.tensor([[5, start, len(tokens), 3, *tokens]], dtype=torch.int32, device=device)
    assert check(state, torch.zeros(1, dtype=torch.int32, device=device), offers) == [1 + len(draft)]
    assert state.tokens[0].tolist() == [*TEXT, *draft, *[0] * (14 - len(draft))]


def test_seats_with_and_without_offers(device: torch.device) -> None:
    """Random texts of two letters, so that about half of the short alignments hold."""
    random, lanes, width, columns = torch.Generator().manual_seed(3), 24, 40, 9
    state = DeviceState(lanes=lanes, width=width, scratch_page=9, device=device)
    state.tokens[:-1] = torch.randint(0, 2, (lanes, width), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, width + 1, (lanes,), generator=random).int().to(device)
    seats = torch.randperm(lanes + 1, generator=random).int().to(device)
    offers = torch.randint(0, 2, (lanes + 1, HEADER + columns), generator=random).int().to(device)
    offers[:, 0] = torch.randint(0, 6, (lanes + 1,), generator=random)
    back = torch.randint(0, 3, (lanes + 1,), generator=random).to(device)
    offers[:, 1] = (state.lengths[seats.long()] - back).clamp(min=0)
    offers[:, 2] = torch.randint(0, columns + 1, (lanes + 1,), generator=random)
    offers[:, 3] = torch.randint(0, 3, (lanes + 1,), generator=random)
    counts = check(state, seats, offers)
    assert all(count == 7 for count, row in zip(counts, offers.tolist(), strict=True) if row[2] == 0)
    assert len({*counts}) >= 4
