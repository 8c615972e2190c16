"""A portfolio: several drafters on one request. Each round drafts what is expected to make the most tokens a second.

Its members are the drafters that are loaded anyway, the cheapest first. Lookups come first. A member is asked where
those before it have found little, and as long as its drafts gain more than they cost (`portfolio.member`). The drafts
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
from paceline.drafters.portfolio.on_device import of_members
from paceline.drafters.portfolio.tree import Union
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.taps import columns
from paceline.drafters.trust import judged
from paceline.errors import InvalidRequest, UnknownOption
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel
from paceline.types import Off

NAME = "portfolio"
LATER_SHARE = 0.5  # part of the gain of drafts before it from which a later member's draft goes alone: it knows more
COVERED = {"ngram": "suffix"}  # member → one beside which it is left out: both look up the same texts


class _Drafted(NamedTuple):
    """A member's draft that waits to be compared with the text."""

    place: int  # of the member
    draft: Draft
    confidence: Sequence[float]  # in each token, after trust
    trust: float
    gain: float  # tokens that it is expected to add, less the prices of its rows in plain decoding


@dataclass(slots=True)
class _Text:
    """A running sequence. The last four fields are of its latest round."""

    with_members: list[Experience]
    greedy: bool = True  # its request is not sampled
    start: int = -1  # committed tokens before the round
    drafted: list[_Drafted] = field(default_factory=list)
    union: Union = field(default_factory=Union)


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
        # Loops instead of comprehensions, and few calls: on a CPU caches are cold after a pass, and this is 3 % of it.
        texts = []
        for ask in asks:
            text = self._texts[ask.key]
            text.greedy = ask.sampler.greedy
            text.start, text.drafted, text.union = len(ask.tokens), [], Union()
            texts.append(text)
        works = False
        for place, member in enumerate(self.members):
            if member.guard.out is None:
                works = True
                self._ask(place, member, asks, texts)
        if not works:
            raise RuntimeError("; ".join([str(member.guard.out) for member in self.members]))
        for text in texts:
            for each in text.drafted:
                own = text.with_members[each.place]
                self.members[each.place].learn_gain(each.gain, own, greedy=text.greedy)
        return [text.union.draft() for text in texts]

    def _ask(self, place: int, member: Member, asks: Sequence[Ask], texts: Sequence[_Text]) -> None:
        """Ask a member for drafts where that is worth it, and add them to those of the members before it."""
        if asks[0].copies_only and not member.guard.copies:
            return
        able = []
        for ask, text in zip(asks, texts, strict=True):
            own = text.with_members[place]
            if not (text.union.complete or own.lost):
                able.append((ask, text, own))
        if not able:
            return
        member.begin_round(len(able), asks[0].plain_speed)
        chosen = [each for each in able if member.is_worth(each[1].union.gain, each[2], each[0])]
        if not chosen:
            return
        asked = [ask for ask, _, _ in chosen]
        drafts = member.draft(asked)
        for (ask, text, own), draft in zip(chosen, drafts, strict=True):
            text.union.passes += draft.depth if draft.passes is None else draft.passes
            if draft.tokens:
                self._join(place, ask, text, draft)
            else:
                member.learn_gain(0.0, own, greedy=text.greedy)
        member.drafted(asked, drafts, [own for _, _, own in chosen])

    def _join(self, place: int, ask: Ask, text: _Text, draft: Draft) -> None:
        """Add a member's draft to those of the members before it, and choose the nodes to draft of all. Of the drafts
        for a sampled request one goes alone: the last, unless it gains much less than one before it.

        Tokens that were drawn for a rule with distributions go alone, and nobody else is asked. They go whatever they
        are: if they were chosen by their values, their distribution would be another one."""
        member, union, prices = self.members[place], text.union, row_prices(ask)
        trust = member.trust_in(draft, text.with_members[place], greedy=text.greedy)
        confidence = trusted(draft, trust)
        # Whether a member pays is a question of plain speed: of the time that its draft takes, rows included.
        gain = gain_of(confidence, prices, share=ask.plain_share)
        made = _Drafted(place, draft, confidence, trust, gain)
        if text.drafted and (draft.probs is not None or not text.greedy):
            if draft.probs is None and gain <= LATER_SHARE * max([each.gain for each in text.drafted]):
                text.drafted.append(made._replace(gain=0.0))
                return
            text.drafted = [each._replace(gain=0.0) for each in text.drafted]  # they are not used
            union.clear()
        text.drafted.append(made)
        union.add(draft, confidence, member.name)
        if draft.probs is None:
            union.choose(prices, limit=ask.max_draft, floor=ask.p_min or 0.0, sure=ask.copies_only)
        else:
            union.complete = True

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        text, start = self._texts[key], len(tokens) - 1 - accepted
        if text.start != start:
            return  # beside a step in flight: a draft before the latest one
        said = tokens[start:].tolist()
        for place, draft, confidence, trust, _ in text.drafted:
            member, own = self.members[place], None if draft.confidence else text.with_members[place]
            parents = draft.parents or range(-1, len(draft.tokens) - 1)
            guesses = judged(draft.tokens, parents, confidence, trust, said)
            for was_right, expected in guesses:
                member.learn_guess(was_right, expected, own, greedy=text.greedy)
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


def trusted(draft: Draft, trust: float) -> Sequence[float]:
    """Return the confidence in each token, times the trust in it and in each before it; 1 where the draft has none."""
    given = draft.confidence or (1.0,) * len(draft.tokens)
    if trust == 1.0:
        return given
    factors = [1.0]  # of the last committed token, then of each drafted one
    for parent in draft.parents or range(-1, len(draft.tokens) - 1):
        factors.append(factors[parent + 1] * trust)
    return [each * factor for each, factor in zip(given, factors[1:], strict=True)]


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    wanted = parse_options(NAME, options, {"members": str}).get("members")
    if target.decoder is not None:
        return Recipe(
            name=NAME,
            build=lambda context: None,
            how="a network drafts, and a lookup where the text repeats surely",
            of_members=lambda drafters: of_members(drafters, wanted),
        )

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
