"""The portfolio that rounds on a device run: of whom it is made, and what it asks of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.drafters import registry
from paceline.drafters.eagle.on_device import TREE_SEATS, EagleBySeats, EagleOnDevice
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice
from paceline.drafters.portfolio.on_device import MIN_MATCH, PortfolioOnDevice, of_members
from paceline.errors import InvalidRequest, UnknownOption
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DeviceDrafter, Seat
from paceline.runner.rounds.traits import (
    LONGEST_COPY,
    SPARE_STATES,
    added_by,
    copies_alone,
    drafter_of,
    drafts_trees,
    head_of,
    held_by,
    held_for,
    longest_copy,
    longest_draft,
    network_of,
    passed_length,
    taps_of,
    threshold_of,
)

HEAD = EagleOnDevice(cast(Any, SimpleNamespace(mask=None)), taps=(1, 2), max_draft=4)
MODEL = ModelOnDevice(cast(Any, "a forward"))


@dataclass
class Noted:
    """A round that notes what is asked of it."""

    longest: int
    found: torch.Tensor = field(default_factory=lambda: torch.full((2,), 7))
    calls: list[str] = field(default_factory=list)

    def limits(self) -> torch.Tensor:
        return torch.tensor([3, 0])

    def copy_sure(self, *, min_ngram: int, max_ngram: int, stays: bool = False) -> None:
        assert MIN_MATCH <= min_ngram <= max_ngram
        self.calls.append("copies that stay" if stays else "copies")


@dataclass
class Network:
    """A network in name only."""

    reader: Any = None
    finds_fewer: bool = False
    reads_draft: bool = False

    def draft(self, round: Any) -> None:
        round.calls.append("network")


@pytest.mark.parametrize(
    ("network", "longest", "calls", "found"),
    [
        (Network(), 4, ["network", "copies"], [3, 0]),
        (Network(finds_fewer=True), 4, ["network", "copies"], [7, 7]),
        (Network(reads_draft=True), 4, ["copies that stay", "network"], [3, 0]),
        (Network(), 0, ["copies"], [0, 0]),
        (Network(finds_fewer=True, reads_draft=True), 0, ["copies"], [0, 0]),
    ],
)
def test_who_drafts_first(network: Network, longest: int, calls: list[str], found: list[int]) -> None:
    """A model reads what is copied; where a network says how much it has found, copies change that."""
    round = Noted(longest)
    PortfolioOnDevice(cast(DeviceDrafter, network), name="network").draft(cast(Any, round))
    assert round.calls == calls
    assert round.found.tolist() == found


def test_a_model_reads_a_draft_unless_it_drafts_over_masks_or_on_the_targets_memory() -> None:
    assert MODEL.reads_draft
    assert not ModelOnDevice(MODEL.forward, mask=3).reads_draft
    assert not ModelOnDevice(MODEL.forward, shares_kv=True).reads_draft


def test_what_rounds_ask_the_network_answers() -> None:
    portfolio = PortfolioOnDevice(HEAD, name="eagle")
    assert isinstance(portfolio, DeviceDrafter)
    assert taps_of(portfolio) == (1, 2)
    assert head_of(portfolio) is HEAD.head
    assert longest_draft(portfolio, 16) == passed_length(portfolio, 16, 16) == 4
    assert portfolio.ends_drafts
    assert not drafts_trees(portfolio)
    assert threshold_of(portfolio, Seat(0, 4, p_min=0.3)) == 0.3
    assert longest_copy(portfolio) == LONGEST_COPY
    assert longest_copy(HEAD) == longest_copy(None) == 0
    assert not hasattr(PortfolioOnDevice(MODEL, name="model"), "threshold")


def test_copies_alone_are_for_those_who_need_not_read_them() -> None:
    assert copies_alone(PortfolioOnDevice(HEAD, name="eagle"))
    assert not copies_alone(PortfolioOnDevice(MODEL, name="model"))
    assert not copies_alone(HEAD)


def test_few_seats_have_the_networks_trees() -> None:
    trees = EagleOnDevice(HEAD.head, taps=(1, 2), branches=3)
    portfolio = PortfolioOnDevice(EagleBySeats(HEAD, trees), name="eagle")
    few, many = (drafter_of(portfolio, count, 16) for count in (TREE_SEATS, TREE_SEATS + 1))
    assert isinstance(few, PortfolioOnDevice)
    assert isinstance(many, PortfolioOnDevice)
    assert drafts_trees(few)
    assert not drafts_trees(many)
    assert (few.network, longest_copy(few)) == ("eagle", LONGEST_COPY)
    assert drafter_of(portfolio, 1, 16) is few, "graphs of a size are of one drafter"


def test_states_are_shared_with_the_network_and_have_room_for_copies() -> None:
    drafters: dict[str, DeviceDrafter] = {"portfolio": PortfolioOnDevice(HEAD, name="eagle"), "eagle": HEAD}
    assert [network_of(name, drafters) for name in drafters] == ["eagle", "eagle"]
    assert [added_by(by, 16) for by in drafters.values()] == [1 + LONGEST_COPY, 1 + 4]
    assert {held_for(name, drafters, 16) for name in drafters} == {1 + LONGEST_COPY + SPARE_STATES}
    assert held_by(HEAD, 16) == 1 + 4 + SPARE_STATES
    alone = {"portfolio": drafters["portfolio"]}
    assert network_of("portfolio", alone) == "portfolio", "where rounds lack the network, it has states of its own"
    assert added_by(drafters["portfolio"], 8) == 1 + 8


def test_the_first_network_and_the_lookup_as_it_was_named() -> None:
    lookup, prediction = LookupOnDevice(min_ngram=3, max_ngram=9), LookupOnDevice(reads_prediction=True)
    drafters = {"prediction": prediction, "ngram": lookup, "eagle": HEAD, "model": MODEL}
    made = of_members(drafters, None)
    assert (made.network, made._min_match, made._max_match) == ("eagle", 3, 9)
    assert of_members(drafters, "model+ngram").network == "model"
    assert of_members({"eagle": HEAD}, None)._min_match == MIN_MATCH
    short = of_members({"eagle": HEAD, "ngram": LookupOnDevice(max_ngram=1)}, None)
    assert (short._min_match, short._max_match) == (MIN_MATCH, MIN_MATCH)
    assert of_members({"eagle": HEAD, "ngram": LookupOnDevice(max_ngram=64)}, None)._max_match == 63


def test_members_that_are_not_there_are_refused() -> None:
    with pytest.raises(UnknownOption, match="suffix"):
        of_members({"eagle": HEAD, "ngram": LookupOnDevice()}, "eagle+suffix")
    with pytest.raises(InvalidRequest, match="name a head or a model beside it"):
        of_members({"ngram": LookupOnDevice()}, None)
    with pytest.raises(InvalidRequest, match="no network"):
        of_members({"eagle": HEAD, "ngram": LookupOnDevice()}, "ngram")


def test_the_recipe_beside_a_target_on_a_gpu() -> None:
    target = cast(ReadyModel, SimpleNamespace(decoder="a decoder", device="cuda", name="big"))
    registry.check_device("portfolio", "cuda")
    made = registry.recipe("portfolio:members=eagle+ngram", target)
    assert made.of_members is not None
    assert made.build(cast(Any, None)) is None, "the host has no part in it"
    portfolio = made.of_members({"model": MODEL, "eagle": HEAD, "ngram": LookupOnDevice()})
    assert isinstance(portfolio, PortfolioOnDevice)
    assert portfolio.network == "eagle"
