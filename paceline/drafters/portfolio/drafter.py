"""A portfolio: several drafters on one request. Each round drafts what is expected to make the most tokens a second.

Its members are the drafters that are loaded anyway, the cheapest first. Lookups always look. A member that computes is
asked where they have found little, and as long as its drafts gain more than they cost (`portfolio.member`). The drafts
of all that were asked become one tree, from which the nodes that pay are drafted (`portfolio.tree`).

Every member's draft is compared with what the target then says, used or not. So confidence that a member claims in vain
counts less and less. Each member is behind a guard of its own: one that fails drops out alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, Ended, FeatureDrafter, Seen, Verified
from paceline.drafters.guard import Guard
from paceline.drafters.options import parse_options
from paceline.drafters.paying import gain_of, row_prices
from paceline.drafters.portfolio.member import Experience, Member
from paceline.drafters.portfolio.tree import NOTHING_COMPUTED, Union
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.taps import columns
from paceline.drafters.trust import judged
from paceline.errors import InvalidRequest, UnknownOption
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel
from paceline.types import Off

NAME = "portfolio"
COVERED = {"ngram": "suffix"}  # member → one beside which it is left out: both look up the same texts


class _Drafted(NamedTuple):
    """A member's draft that waits to be compared with the text."""

    place: int  # of the member
    draft: Draft
    confidence: list[float]  # in each token, after trust
    trust: float


@dataclass(slots=True)
class _Text:
    """A running sequence."""

    with_members: list[Experience]
    start: int = -1  # committed tokens before the latest round
    drafted: list[_Drafted] = field(default_factory=list)  # in the latest round


class PortfolioDrafter(FeatureDrafter):
    name = NAME
    ends_drafts = True
    weighs_cost = True

    def __init__(self, guards: Sequence[Guard], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`guards`: of the members, the cheapest first. `clock`: seconds, by which the members' drafts are measured."""
        assert guards, "a portfolio has members"
        self.members = [Member(guard, clock=clock) for guard in guards]
        self.max_draft = max(guard.max_draft for guard in guards)
        self.shares_kv = any(guard.shares_kv for guard in guards)
        self.copies = any(guard.copies for guard in guards)
        self._hearers = [guard for guard in guards if guard.hears_logits]
        self.hears_logits = bool(self._hearers)
        self.taps = sorted({tap for guard in guards for tap in guard.taps})
        # place of each member that reads hidden states, and what selects its taps
        self._readers = [(i, columns(guard.taps, self.taps)) for i, guard in enumerate(guards) if guard.taps]
        self._texts: dict[int, _Text] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._texts[key] = _Text([Experience() for _ in self.members])
        for member in self.members:
            member.guard.start(key, lane, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if all(member.guard.out is not None for member in self.members):
            raise RuntimeError("; ".join([str(member.guard.out) for member in self.members]))
        unions = [Union() for _ in asks]
        drafts = [NOTHING_COMPUTED] * len(asks)
        for ask in asks:
            text = self._texts[ask.key]
            text.start, text.drafted = len(ask.tokens), []
        for place, member in enumerate(self.members):
            chosen = self._choose(place, member, asks, unions)
            own = [self._texts[asks[i].key].with_members[place] for i in chosen]
            made = member.draft([asks[i] for i in chosen], own) if chosen else ()
            for i, draft in zip(chosen, made, strict=True):
                if draft.tokens or draft.passes:
                    drafts[i] = self._joined(place, asks[i], unions[i], draft)
                else:
                    member.learn_gain(0.0, self._texts[asks[i].key].with_members[place])
        return drafts

    def _choose(self, place: int, member: Member, asks: Sequence[Ask], unions: Sequence[Union]) -> list[int]:
        """Return the places of the asks for which a member is asked."""
        if member.guard.out is not None or (asks[0].copies_only and not member.guard.copies):
            return []
        able = [(i, self._texts[ask.key].with_members[place]) for i, ask in enumerate(asks) if not unions[i].complete]
        able = [(i, own) for i, own in able if not own.lost]
        if not able:
            return []
        member.begin_round(len(able), asks[0].plain_speed)
        return [i for i, own in able if member.is_worth(unions[i].gain, own)]

    def _joined(self, place: int, ask: Ask, union: Union, draft: Draft) -> Draft:
        """Add a member's draft to those of the members before it, and return what to draft of all.

        Tokens that were drawn for a rule with distributions go alone, and nobody else is asked. They go whatever they
        are: if they were chosen by their values, their distribution would be another one."""
        member, text = self.members[place], self._texts[ask.key]
        own = text.with_members[place]
        union.passes += draft.depth if draft.passes is None else draft.passes
        prices = row_prices(ask)
        gain = 0.0
        if draft.tokens:
            trust = member.trust_in(draft, own)
            confidence = trusted(draft, trust)
            text.drafted.append(_Drafted(place, draft, confidence, trust))
            if union.tokens and not ask.sampler.greedy:
                union.clear()
            union.add(draft, confidence, member.name)
            # Whether a member pays is a question of plain speed: of the time that its draft takes, rows included.
            gain = gain_of(confidence, prices, share=ask.plain_share)
        member.learn_gain(gain, own)
        nodes = union.choose(prices, limit=ask.max_draft, floor=ask.p_min or 0.0, sure=ask.copies_only)
        if draft.probs is not None:
            union.complete = True
            return Draft(draft.tokens, draft.parents, draft.probs, passes=union.passes, by=member.name)
        return union.draft(nodes)

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        text, start = self._texts[key], len(tokens) - 1 - accepted
        if text.start != start:
            return  # beside a step in flight: a draft before the latest one
        said = tokens[start:].tolist()
        for place, draft, confidence, trust in text.drafted:
            member, own = self.members[place], None if draft.confidence else text.with_members[place]
            parents = draft.parents or range(-1, len(draft.tokens) - 1)
            guesses = judged(draft.tokens, parents, confidence, trust, said)
            for was_right, expected in guesses:
                member.learn_guess(was_right, expected, own)
            right = min(sum([was_right for was_right, _ in guesses]), accepted)
            member.guard.observe(key, tokens[: start + right + 1], right)
        text.drafted = []

    def learn(self, ended: Ended) -> None:
        for member in self.members:
            member.guard.learn(ended)

    def stop(self, key: int) -> None:
        del self._texts[key]
        for member in self.members:
            member.guard.stop(key)

    def hear(self, verified: Sequence[Verified]) -> None:
        for guard in self._hearers:
            guard.hear(verified)

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        """Feed the members that read hidden states. A sequence that one of them gives up goes on with the others."""
        for place, select in self._readers:
            known = [each for each in seen if not self._texts[each.key].with_members[place].lost]
            lost = self.members[place].guard.feed(select(features), known, crowded=crowded) if known else ()
            for key in lost:
                if key in self._texts:
                    self._texts[key].with_members[place].lost = True
        return {}

    def knows(self, page: int) -> bool:
        return all(self.members[place].guard.knows(page) for place, _ in self._readers)


def trusted(draft: Draft, trust: float) -> list[float]:
    """Return the confidence in each token, times the trust in it and in each before it; 1 where the draft has none."""
    given = draft.confidence or (1.0,) * len(draft.tokens)
    if trust == 1.0:
        return [*given]
    factors = [1.0]  # of the last committed token, then of each drafted one
    for parent in draft.parents or range(-1, len(draft.tokens) - 1):
        factors.append(factors[parent + 1] * trust)
    return [each * factor for each, factor in zip(given, factors[1:], strict=True)]


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    wanted = parse_options(NAME, options, {"members": str}).get("members")

    def build(context: BuildContext) -> PortfolioDrafter:
        able = {name: guard for name, guard in context.drafters.items() if not guard.needs_prediction}
        chosen = [name for name in able if COVERED.get(name) not in able] if wanted is None else wanted.split("+")
        for name in chosen:
            if name not in able:
                raise UnknownOption(f"member of the drafter {NAME}", name, able)
        members = [able[name] for name in able if name in chosen]
        if not members:
            raise InvalidRequest(f"the drafter {NAME} has no members: name others beside it, such as suffix")
        return PortfolioDrafter(members)

    return Recipe(name=NAME, build=build, how="takes what pays of the other drafters, in each round")
