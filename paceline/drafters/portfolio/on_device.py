"""A portfolio inside rounds on a device: a network drafts, and where a text repeats surely a copy takes its place.

Both work for every seat of one round. The lookup is two launches behind the passes of the network, and costs a round
nothing else. The device decides who drafts, by the length of the match: the host sends the shortest one that is sure,
for each seat (`engine.copying`). A round may also go without the network, and only copy.

    the network   pass │ pass │ pass │                     drafts of all seats
    the lookup                       │ search │ copy       over those of seats with a long match

It is not a third kind of drafter: whatever rounds ask beyond this (heads, hidden states, trees) the network answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.drafters.ngram import LookupOnDevice
from paceline.errors import InvalidRequest, UnknownOption
from paceline.kernels.base import Forward
from paceline.kernels.lookup_reference import DRAFTED, SIZE_SHIFT
from paceline.runner.rounds.protocol import DeviceDrafter, DraftingRound
from paceline.runner.rounds.traits import LONGEST_COPY, drafter_of

MIN_MATCH = 2  # tokens of the shortest match that is reported: one token alone repeats by chance
MAX_MATCH = (DRAFTED >> SIZE_SHIFT) - 1  # tokens of the longest one that fits a report


class PortfolioOnDevice:
    """Implements DeviceDrafter."""

    finds_fewer = True
    max_copy = LONGEST_COPY

    def __init__(self, drafter: DeviceDrafter, *, name: str, lookup: LookupOnDevice | None = None) -> None:
        """`drafter`: the network, which rounds know by its `name`."""
        lookup = lookup or LookupOnDevice()
        self.network = name
        self._drafter = drafter
        self._lookup = lookup
        self._min_match = max(MIN_MATCH, lookup.min_ngram)
        self._max_match = min(MAX_MATCH, max(lookup.max_ngram, self._min_match))
        self._sized: dict[int, PortfolioOnDevice] = {}  # by the network's own drafter of a size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_drafter"], name)

    @property
    def reader(self) -> Forward | None:
        return self._drafter.reader

    def sized(self, seats: int, most: int) -> PortfolioOnDevice:
        """Return the drafter of rounds with so many seats."""
        inner = drafter_of(self._drafter, seats, most)
        if inner is None or inner is self._drafter:
            return self
        if id(inner) not in self._sized:
            self._sized[id(inner)] = PortfolioOnDevice(inner, name=self.network, lookup=self._lookup)
        return self._sized[id(inner)]

    def draft(self, round: DraftingRound) -> None:
        if not round.longest:
            round.found.zero_()
            self._copy(round)
        elif getattr(self._drafter, "reads_draft", False):  # it must read the copy, which the next round goes on from
            round.found.copy_(round.limits())
            self._copy(round, stays=True)
            self._drafter.draft(round)
        else:
            self._drafter.draft(round)
            if not self._drafter.finds_fewer:
                round.found.copy_(round.limits())
            self._copy(round)

    def _copy(self, round: DraftingRound, *, stays: bool = False) -> None:
        round.copy_sure(min_ngram=self._min_match, max_ngram=self._max_match, stays=stays)


def of_members(drafters: Mapping[str, DeviceDrafter], members: str | None) -> PortfolioOnDevice:
    """Make the portfolio of the drafters inside a device's rounds: of the first network among them, and of the lookup.

    `members`: names joined by "+" among which both are chosen; None: all. The lookup needs no drafter of its own."""
    chosen = [*drafters] if members is None else members.split("+")
    for name in chosen:
        if name not in drafters:
            raise UnknownOption("member of the drafter portfolio", name, drafters)
    network = next((name for name in chosen if not isinstance(drafters[name], LookupOnDevice)), None)
    if network is None:
        raise InvalidRequest(
            "on a GPU the drafter portfolio is of a network and a lookup, and no network is loaded that the GPU runs: "
            "name a head or a model beside it"
        )
    lookups = [by for by in (drafters[name] for name in chosen) if isinstance(by, LookupOnDevice)]
    lookup = next((by for by in lookups if not by.reads_prediction), None)
    return PortfolioOnDevice(drafters[network], name=network, lookup=lookup)
