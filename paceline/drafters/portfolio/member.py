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
SURE_PROFIT = 1.25  # factor of the cost that gains must reach before the next rest is a short one again
PASSING_TOKENS = 8  # new tokens up to which the time of a draft is typical: a member reads what it has missed first
EXPECTED_SHARE = 0.5  # part of the tokens that an answer may still have, which it is expected to have
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
class Prospects:
    """Prospects of a member with requests of one kind, greedy or sampled: what its drafts gain, trust, and rests."""

    gains: Gains = field(default_factory=lambda: Gains(ALL_DECAY, FIRST_GAIN * FIRST_WEIGHT, FIRST_WEIGHT))
    trust: Trust = field(default_factory=lambda: Trust(right=PRIOR_GUESSES, expected=PRIOR_GUESSES))
    rest: float = FIRST_REST  # times of the trial that the next rest lasts
    resumes: float = 0.0  # time at which the rest ends
    trial: int = 0  # rounds of a trial that are left
    spent: float = 0.0  # seconds of the trial so far

    @property
    def usual(self) -> float:
        """Mean gain of a draft lately, in tokens."""
        return self.gains.gained / self.gains.drafts

    def begin_trial(self) -> None:
        """Let what is known count half, and try for some rounds."""
        self.trial, self.spent = TRIAL_ROUNDS, 0.0
        self.gains.fade()

    def count(self, now: float, seconds: float) -> None:
        """Count drafts of a trial; after its last round a rest begins."""
        self.trial -= 1
        self.spent += seconds
        if not self.trial:
            self.resumes = now + self.rest * self.spent
            self.rest = min(2 * self.rest, MAX_REST)


@dataclass(slots=True)
class Experience:
    """Experience with a member in one sequence."""

    gains: Gains = field(default_factory=Gains)
    trust: Trust = field(default_factory=Trust)
    lost: bool = False  # the member cannot draft for this sequence any more
    asked: int = 0  # committed tokens when it last drafted: it has read these


class Member:
    def __init__(self, guard: Guard, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.guard = guard
        self.name = guard.name
        self.seconds: dict[int, float] = {}  # number of drafts that are made at once → seconds of all
        self.reading = 0.0  # seconds for each token that it has missed of a sequence, before it drafts
        self.greedy, self.sampled = Prospects(), Prospects()
        self._clock = clock
        self._drafts = 0
        self._began = 0.0  # time at which the latest drafts were asked for
        self._plain_speed = 0.0  # tokens a second that the engine would make without drafts
        self._cost = 0.0  # tokens that it would make in the time of a draft, in this round

    def prospects(self, *, greedy: bool) -> Prospects:
        return self.greedy if greedy else self.sampled

    def begin_round(self, asks: int, plain_speed: float) -> None:
        """Begin a round in which up to so many sequences may be asked for; `plain_speed`: see Ask."""
        self._plain_speed = plain_speed
        self._cost = self._seconds_of(asks) / asks * plain_speed

    def is_worth(self, gain: float, own: Experience, ask: Ask) -> bool:
        """Return whether to ask for a draft where the members before have drafted with this `gain`.

        That is where they gain less than this member's drafts usually do in this text, less what they cost. A member
        whose drafts gain less than they cost rests, longer each time, and is then tried for all sequences. It does not
        begin to read a text whose answer is too short to make up for that."""
        if not self._cost or self._drafts < FIRST_DRAFTS:
            return True
        prospects = self.prospects(greedy=ask.sampler.greedy)
        usual = prospects.usual
        if usual > SURE_PROFIT * self._cost:
            prospects.rest = FIRST_REST
        profit = (own.gains.gained + PRIOR_DRAFTS * usual) / (own.gains.drafts + PRIOR_DRAFTS) - self._cost
        if profit <= 0 and not prospects.trial and self._clock() >= prospects.resumes:
            prospects.begin_trial()
            own.gains.fade()
        if gain >= max(ENOUGH_GAIN, profit):
            return False
        return prospects.trial > 0 or (profit > 0 and self._makes_up(profit, usual, ask, own))

    def _makes_up(self, profit: float, usual: float, ask: Ask, own: Experience) -> bool:
        """Return whether drafts that gain `profit` each make up for the time in which it reads what it has missed."""
        missed = len(ask.tokens) - own.asked
        if missed <= PASSING_TOKENS:
            return True
        rounds = EXPECTED_SHARE * ask.left / (1.0 + max(usual, 0.0))
        return profit * rounds > missed * self.reading * self._plain_speed

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        """Ask for drafts, and begin to measure how long they take; `drafted` ends that."""
        self._began = self._clock()
        return self.guard.propose([ask.within(self.guard.max_draft) for ask in asks])

    def drafted(self, asks: Sequence[Ask], drafts: Sequence[Draft], experience: Sequence[Experience]) -> None:
        """Learn from the time that drafts took, with all that the portfolio does with them. `experience`: of each
        ask's sequence."""
        ended = self._clock()
        seconds, missed = ended - self._began, 0
        for ask, own, draft in zip(asks, experience, drafts, strict=True):
            length = len(ask.tokens)
            missed += length - own.asked if length - own.asked > PASSING_TOKENS else 0
            if draft.tokens:  # else it may still be reading
                own.asked = length
        for greedy, prospects in ((True, self.greedy), (False, self.sampled)):
            if prospects.trial and any(ask.sampler.greedy is greedy for ask in asks):
                prospects.count(ended, seconds)
        known = self.seconds.get(len(asks), 0.0)
        if missed:
            self._learn_reading(missed, seconds - known if known else 0.0)
        elif seconds > known or any(draft.tokens for draft in drafts):
            self._learn_time(len(asks), seconds)  # an empty draft may be quick
        self._drafts += 1

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

    def _learn_reading(self, missed: int, seconds: float) -> None:
        if seconds > 0:
            self.reading += (TIME_SHARE if self.reading else 1.0) * (seconds / missed - self.reading)

    def trust_in(self, draft: Draft, own: Experience, *, greedy: bool) -> float:
        """Return the factor for each token of a draft. A draft without confidence has that of its sequence's others."""
        trust = self.prospects(greedy=greedy).trust
        return min(1.0, trust.right / trust.expected) if draft.confidence else own.trust.factor(trust)

    def learn_gain(self, gain: float, own: Experience, *, greedy: bool) -> None:
        own.gains.learn(gain)
        self.prospects(greedy=greedy).gains.learn(gain)

    def learn_guess(self, right: bool, expected: float, own: Experience | None, *, greedy: bool) -> None:
        """Learn whether a guess was right; `own`: of its sequence, if the draft had no confidence."""
        if own is not None:
            own.trust.learn(right, expected)
        self.prospects(greedy=greedy).trust.learn(right, expected)
