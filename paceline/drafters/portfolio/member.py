"""Members of a portfolio: when one is asked for a draft, by what it costs and what its drafts were worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.guard import Guard
from paceline.drafters.trust import Trust

# Tokens, all chosen by replay: docs/experiments.md, "Several drafters on one request".
CHEAP_COST = 0.02  # a member whose draft costs less is always asked: under 1 % of a round
ENOUGH_GAIN = 0.6  # where the drafts of cheaper members gain more, nothing is computed
FIRST_GAIN, FIRST_WEIGHT = 2.0, 2.0  # gain of a member's draft before any is known, and drafts that it weighs as
FIRST_DRAFTS = 8  # drafts in which a member's time is measured, whatever they cost
PRIOR_DRAFTS = 8.0  # drafts that the gain in all sequences weighs as much as, for one sequence
PRIOR_GUESSES = 10.0  # right guesses that the trust in a member begins with
TEXT_DECAY, ALL_DECAY = 0.95, 0.98  # weight of the past at each draft, for one sequence and for all
MAX_REST = 64  # rounds, at most, after which a member that does not pay is asked again
TRIAL_DRAFTS = 3  # drafts in a row after a rest, beside which the past counts half: the text may have changed
PASSING_TOKENS = 8  # new tokens up to which the time of a draft is typical: a member reads what it has missed first
TIME_SHARE, OUTLIER = 0.1, 2.0  # part by which a draft's time moves the average, and factor by which it counts at most


@dataclass(slots=True)
class Gains:
    """Gains of drafts, decayed: the tokens that they were expected to add, less the prices of their rows."""

    decay: float = TEXT_DECAY
    gained: float = 0.0
    drafts: float = 0.0

    def learn(self, gain: float) -> None:
        self.gained = self.decay * self.gained + gain
        self.drafts = self.decay * self.drafts + 1.0

    def fade(self) -> None:
        """Let all that is known count half."""
        self.gained, self.drafts = self.gained / 2, self.drafts / 2


@dataclass(slots=True)
class Experience:
    """Experience with a member in one sequence."""

    gains: Gains = field(default_factory=Gains)
    trust: Trust = field(default_factory=Trust)
    lost: bool = False  # the member cannot draft for this sequence any more
    asked: int = -PASSING_TOKENS  # committed tokens when it was last asked


class Member:
    def __init__(self, guard: Guard, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.guard = guard
        self.name = guard.name
        self.seconds = 0.0  # of one draft
        self._clock = clock
        self._drafts = 0
        self._gains = Gains(ALL_DECAY, FIRST_GAIN * FIRST_WEIGHT, FIRST_WEIGHT)
        self._trust = Trust(right=PRIOR_GUESSES, expected=PRIOR_GUESSES)
        self._rested = 0  # rounds since it was last asked although it does not pay
        self._rest = 1  # rounds of its next rest
        self._trial = 0  # drafts of a trial that are left

    def is_worth(self, ask: Ask, gain: float, own: Experience) -> bool:
        """Return whether to ask for a draft where the members before have drafted with this `gain`.

        A member whose drafts gain less than they cost rests, twice as long each time, and is then tried again."""
        cost = self.seconds * ask.plain_speed
        if cost < CHEAP_COST or self._drafts < FIRST_DRAFTS:
            return True
        prior = PRIOR_DRAFTS * self._gains.gained / self._gains.drafts
        if (own.gains.gained + prior) / (own.gains.drafts + PRIOR_DRAFTS) > cost:
            self._rest, self._trial = 1, 0
            return gain < ENOUGH_GAIN
        if self._trial:
            self._trial -= gain < ENOUGH_GAIN
            return gain < ENOUGH_GAIN
        self._rested += 1
        if self._rested <= self._rest:
            return False
        self._rested, self._rest, self._trial = 0, min(2 * self._rest, MAX_REST), TRIAL_DRAFTS
        self._gains.fade()
        own.gains.fade()
        return False

    def draft(self, asks: Sequence[Ask], experience: Sequence[Experience]) -> list[Draft]:
        """Ask for drafts, and measure how long one takes. `experience`: of each ask's sequence."""
        began = self._clock()
        drafts = self.guard.propose([ask.within(self.guard.max_draft) for ask in asks])
        seconds = (self._clock() - began) / len(asks)
        typical = True
        for ask, own in zip(asks, experience, strict=True):
            typical = typical and len(ask.tokens) - own.asked <= PASSING_TOKENS
            own.asked = len(ask.tokens)
        if typical and (seconds > self.seconds or any(draft.tokens for draft in drafts)):  # an empty draft may be quick
            self._learn_time(seconds)
        self._drafts += 1
        return drafts

    def _learn_time(self, seconds: float) -> None:
        if not self.seconds:
            self.seconds = seconds
        elif self._drafts < FIRST_DRAFTS:  # the first draft of a sequence may read its whole prompt
            self.seconds = min(seconds, self.seconds)
        else:
            self.seconds += TIME_SHARE * (min(seconds, OUTLIER * self.seconds) - self.seconds)

    def trust_in(self, draft: Draft, own: Experience) -> float:
        """Return the factor for each token of a draft. A draft without confidence has that of its sequence's others."""
        if not draft.confidence:
            return own.trust.factor(self._trust)
        return min(1.0, self._trust.right / self._trust.expected)

    def learn_gain(self, gain: float, own: Experience) -> None:
        own.gains.learn(gain)
        self._gains.learn(gain)

    def learn_guess(self, right: bool, expected: float, own: Experience | None) -> None:
        """Learn whether a guess was right; `own`: of its sequence, if the draft had no confidence."""
        if own is not None:
            own.trust.learn(right, expected)
        self._trust.learn(right, expected)
