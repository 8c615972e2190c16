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
ENOUGH_GAIN = 1.0  # where the drafts of cheaper members gain more, nothing is computed that usually gains no more
FIRST_GAIN, FIRST_WEIGHT = 2.0, 2.0  # gain of a member's draft before any is known, and drafts that it weighs as
FIRST_DRAFTS = 8  # drafts in which a member's time is measured, whatever they cost
PRIOR_DRAFTS = 8.0  # drafts that the gain in all sequences weighs as much as, for one sequence
PRIOR_GUESSES = 10.0  # right guesses that the trust in a member begins with
TEXT_DECAY, ALL_DECAY = 0.95, 0.98  # weight of the past at each draft, for one sequence and for all
TRIAL_ROUNDS = 3  # rounds in a row after a rest, beside which the past counts half: the text may have changed
FIRST_REST, MAX_REST = 4.0, 100.0  # times of a trial that the rest after it lasts: the first one, and at most
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
        self.seconds: dict[int, float] = {}  # number of drafts that are made at once → seconds of all
        self._clock = clock
        self._drafts = 0
        self._gains = Gains(ALL_DECAY, FIRST_GAIN * FIRST_WEIGHT, FIRST_WEIGHT)
        self._trust = Trust(right=PRIOR_GUESSES, expected=PRIOR_GUESSES)
        self._cost = 0.0  # tokens that the engine would make plainly in the time of a draft, in this round
        self._rest = FIRST_REST  # times of the trial that the next rest lasts
        self._resumes = 0.0  # time at which the rest ends
        self._trial = 0  # rounds of a trial that are left
        self._spent = 0.0  # seconds of the trial so far

    def begin_round(self, asks: int, plain_speed: float) -> None:
        """Begin a round in which up to so many sequences may be asked for; `plain_speed`: see Ask."""
        self._cost = self._seconds_of(asks) / asks * plain_speed

    def is_worth(self, gain: float, own: Experience) -> bool:
        """Return whether to ask for a draft where the members before have drafted with this `gain`.

        That is where they gain less than this member's drafts usually do in this text, less what they cost. A member
        whose drafts gain less than they cost rests, longer each time, and is then tried for all sequences."""
        if not self._cost or self._drafts < FIRST_DRAFTS:
            return True
        usual = self._gains.gained / self._gains.drafts
        if usual > self._cost:
            self._rest = FIRST_REST
        profit = (own.gains.gained + PRIOR_DRAFTS * usual) / (own.gains.drafts + PRIOR_DRAFTS) - self._cost
        if profit <= 0 and not self._trial and self._clock() >= self._resumes:
            self._trial, self._spent = TRIAL_ROUNDS, 0.0
            self._gains.fade()
            own.gains.fade()
        return gain < max(ENOUGH_GAIN, profit) and (profit > 0 or self._trial > 0)

    def draft(self, asks: Sequence[Ask], experience: Sequence[Experience]) -> list[Draft]:
        """Ask for drafts, and measure how long they take. `experience`: of each ask's sequence."""
        began = self._clock()
        drafts = self.guard.propose([ask.within(self.guard.max_draft) for ask in asks])
        ended = self._clock()
        if self._trial:
            self._count_trial(ended, ended - began)
        typical, seconds = True, ended - began
        for ask, own in zip(asks, experience, strict=True):
            length = len(ask.tokens)
            typical = typical and length - own.asked <= PASSING_TOKENS
            own.asked = length
        if typical and (seconds > self.seconds.get(len(asks), 0.0) or any(draft.tokens for draft in drafts)):
            self._learn_time(len(asks), seconds)  # an empty draft may be quick
        self._drafts += 1
        return drafts

    def _count_trial(self, now: float, seconds: float) -> None:
        """Count drafts of a trial; after its last round a rest begins."""
        self._trial -= 1
        self._spent += seconds
        if not self._trial:
            self._resumes = now + self._rest * self._spent
            self._rest = min(2 * self._rest, MAX_REST)

    def _seconds_of(self, asks: int) -> float:
        """Return the seconds of so many drafts at once; if they are not known, by the next smaller number."""
        if asks in self.seconds:
            return self.seconds[asks]
        fewer = max([count for count in self.seconds if count < asks], default=0)
        more = min([count for count in self.seconds if count > asks], default=0)
        return self.seconds[fewer] * asks / fewer if fewer else self.seconds.get(more, 0.0)

    def _learn_time(self, asks: int, seconds: float) -> None:
        known = self.seconds.get(asks)
        if known is None:
            self.seconds[asks] = seconds
        elif self._drafts < FIRST_DRAFTS:  # the first draft of a sequence may read its whole prompt
            self.seconds[asks] = min(seconds, known)
        else:
            self.seconds[asks] += TIME_SHARE * (min(seconds, OUTLIER * known) - known)

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
