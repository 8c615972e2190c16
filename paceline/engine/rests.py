"""Rests of a device's drafters: where plain rounds are faster, a drafter drafts only in a probe now and then. And its
trial before: see `Trials`.

A round that drafts takes longer for every sequence of the batch. So all sequences of a drafter rest together, and probe
together. A rest is so long that the trial or probe before it took no more than `PROBE_SHARE` of the time, all that the
drafter had to read for it included; where even perfect drafts would not pay there is no probe. If the batch changes,
what pays is computed anew, but the next probe comes no earlier: a batch that shrinks and grows again would probe at
every change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

PROBE_SHARE = 0.005  # share of the time that probes may take
MAX_TRIAL = 16  # rounds after which a drafter drafts although the times of its rounds are not known
AFTER_TRIAL = 128  # rounds of the rest after a first trial, unless that cost more: a single measurement may be wrong
MAX_REST = 512  # rounds after which what pays is computed anew where a rest has no probe: sequences have changed
MAX_PROBED_REST = 4096  # rounds of a rest with a probe: even one that takes twenty plain rounds keeps to its share


@dataclass(slots=True)
class Rest:
    batch: int  # sequences of the batch for which it was computed that drafts do not pay
    rounds: int  # rounds that are left
    hopeless: bool  # even perfect drafts would not pay, by the device's times alone
    news: bool = False  # the probe has landed or the batch has changed: what pays is computed anew, without a probe


def rest_after(dearer: float) -> int:
    """Return the rounds of a rest after a probe that takes `dearer` times as long as a plain round, in addition."""
    return min(max(int(dearer / PROBE_SHARE), 1), MAX_PROBED_REST)


class Rests:
    def __init__(self) -> None:
        self._rests: dict[str, Rest] = {}  # by drafter

    def count_down(self, drafter: str | None, *, batch: int) -> bool:
        """Count a round, and return True if the drafter rests in it whatever its sequences have learned."""
        rest = self._rests.get(drafter or "")
        if rest is None:
            return False
        rest.rounds -= 1
        if rest.rounds < 0:
            self.end(drafter)
            return False
        if abs(batch - rest.batch) > rest.batch // 4:
            rest.batch, rest.news = batch, True
        news, rest.news = rest.news, False
        return not news

    def __contains__(self, drafter: str) -> bool:
        return drafter in self._rests

    def begin(self, drafter: str, *, batch: int, rounds: int, hopeless: bool = False) -> None:
        self._rests[drafter] = Rest(batch, rounds, hopeless)

    def extend(self, drafter: str, rounds: int) -> None:
        """Let a rest, if there is one, last for at least `rounds` more."""
        if (rest := self._rests.get(drafter)) is not None:
            rest.rounds = max(rest.rounds, rounds)

    def is_hopeless(self, drafter: str) -> bool:
        return self._rests[drafter].hopeless

    def tell(self, drafter: str | None) -> None:
        """Note that a draft of this drafter was judged."""
        if (rest := self._rests.get(drafter or "")) is not None:
            rest.news = True

    def end(self, drafter: str | None) -> None:
        self._rests.pop(drafter or "", None)


@dataclass(slots=True)
class Trial:
    batch: int  # sequences of the batch when the trial began
    each: int  # rounds with drafts in a row: 2 if the drafter may have to read in the first what it has missed
    rounds: int = 0  # rounds since then
    drafting: int = 0  # rounds with drafts that were launched in a row
    judged: int = 0  # rounds of these that have landed


class Trials:
    """First rounds of a drafter with a batch of some size: plain ones, then one or two with drafts at a time, until the
    time of both kinds is known. Until then drafts may cost more than they bring."""

    def __init__(self) -> None:
        self._trials: dict[str, Trial] = {}  # by drafter
        self._failed: Counter[str] = Counter()  # drafter → trials in a row after which it rested

    def goes_plain(self, drafter: str, *, batch: int, knows_plain: bool, reads: bool = False) -> bool:
        """Count a round, and return whether it is plain. Never after MAX_TRIAL rounds: their times stay unknown.
        `reads`: the drafter must have read a text that it continues."""
        trial = self._trials.get(drafter)
        if trial is None or abs(batch - trial.batch) > trial.batch // 4:
            trial = self._trials[drafter] = Trial(batch, each=2 if reads else 1)
        trial.rounds += 1
        plain = trial.rounds <= MAX_TRIAL and (trial.drafting >= trial.each or not knows_plain)
        trial.drafting += not plain
        return plain

    def tell(self, drafter: str | None) -> None:
        """Note that a draft of this drafter was judged."""
        if (trial := self._trials.get(drafter or "")) is not None:
            trial.judged += 1
            if trial.judged >= trial.each:
                trial.drafting = trial.judged = 0

    def end(self, drafter: str, *, pays: bool) -> int:
        """End a trial if there is one. Return the rounds of the rest after it at most, four times as many after each
        trial that ends in one; 0: there was none."""
        if pays:
            del self._failed[drafter]
        if self._trials.pop(drafter, None) is None:
            return 0
        self._failed[drafter] += 1
        return min(AFTER_TRIAL << 2 * (self._failed[drafter] - 1), MAX_PROBED_REST)


class Chance(NamedTuple):
    """The prospects of a drafter with one sequence."""

    found: float  # probability that it drafts anything
    rate: float  # probability that a level of a draft has the right token, if all levels before it have it
    longest: int  # tokens of its longest draft; 0: none


PLAIN = Chance(0.0, 0.0, 0)


def speeds(chances: Seq[Chance], seconds: Seq[float], levels: Seq[int]) -> list[float]:
    """Return tokens per second of the batch with drafts of at most 0, 1, … tokens. `seconds[n]`: time of a round with
    drafts of n tokens; `levels[n]`: levels of such a draft.

    Of several lengths with as many levels only the longest counts, the others have 0: more tokens on a level make it
    more likely that one of them is right, and each is drafted only if it pays for its row."""
    longest = min(max([chance.longest for chance in chances]), len(seconds) - 1)
    more = [float(len(chances)), *[0.0] * levels[longest]]  # [n]: tokens that level n of the drafts adds to the batch
    for chance in chances:
        right = chance.found
        for level in range(1, levels[min(chance.longest, longest)] + 1):
            right *= chance.rate
            more[level] += right
    tokens = [*itertools.accumulate(more)]
    whole = [n == longest or levels[n] < levels[n + 1] for n in range(longest + 1)]
    return [tokens[levels[n]] / seconds[n] if whole[n] else 0.0 for n in range(longest + 1)]
