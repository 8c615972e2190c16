"""Pace: the draft length of one sequence. It grows while drafts are accepted, shrinks after a rejection, and pauses.

Every sequence has its own pace, because acceptance differs more between texts than between drafters. After a pause one
draft probes whether acceptance has changed; the length of pauses doubles while it has not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.types import Off, OffKind

FIRST_DRAFT = 4  # tokens of a sequence's first draft
DECAY = 0.8  # weight of the past at each round, for `rate`
OTHERS_DECAY = 0.95  # weight of the past at each draft of any sequence
MAX_SKIPS = 8  # steps without an ask between two drafts of copies that have no token
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 3.0  # acceptance assumed before any round, and the judged tokens it weighs as much as


@dataclass(slots=True)
class Others:
    """Recent drafts of one drafter for all sequences: what a new sequence may expect of it."""

    found: float = 1.0  # share of drafts that had any token
    _right: float = PRIOR_RATE * PRIOR_WEIGHT  # judged tokens that were right, decayed
    _judged: float = PRIOR_WEIGHT  # all judged tokens, decayed

    @property
    def rate(self) -> float:
        """Probability that a drafted token is right, given that all drafted tokens before it are."""
        return self._right / self._judged

    def learn(self, drafted: int, accepted: int) -> None:
        self.found += (1 - OTHERS_DECAY) * ((drafted > 0) - self.found)
        if drafted:
            self._right = OTHERS_DECAY * self._right + accepted
            self._judged = OTHERS_DECAY * self._judged + accepted + (accepted < drafted)


@dataclass(slots=True)
class Pace:
    length: int = FIRST_DRAFT  # tokens of the next draft
    pauses: int = 0
    reason: Off | None = None  # reason for the last pause
    _found: float = 0.0  # recent drafts that had any token, decayed, as a share
    _unknown: float = 1.0  # weight of other sequences' drafts in that share, decayed
    _drafted: int = 0  # drafted tokens in the current acceptance window
    _accepted: int = 0  # accepted tokens in that window
    _resume_at: int = 0  # output tokens at which the pause ends
    _strikes: int = 0  # pauses since acceptance was last good
    _probing: bool = False  # after a pause: the next draft ignores cost, to measure whether acceptance has changed
    _right: float = 0.0  # recently judged tokens that were right, decayed
    _judged: float = 0.0  # all recently judged tokens, decayed
    _prior: float = PRIOR_WEIGHT  # weight of the assumed acceptance in `recent`, decayed
    _misses: int = 0  # drafts in a row that had no token
    _skips: int = 0  # steps that `skips` will leave out

    @property
    def rate(self) -> float:
        """Probability that a drafted token is right, given that all drafted tokens before it are."""
        return (self._right + PRIOR_RATE * PRIOR_WEIGHT) / (self._judged + PRIOR_WEIGHT)

    def recent(self, others: Others) -> tuple[float, float]:
        """Return the probabilities that a draft has any token, and that a drafted token is right: by recent drafts
        alone once there are some, before by those of `others`.

        For rounds on a device, where all sequences pay for a draft that is wrong."""
        rate = (self._right + others.rate * self._prior) / (self._judged + self._prior)
        return self._found + others.found * self._unknown, rate

    def skips(self) -> bool:
        """Count a step, and return whether no draft is asked for in it: the longer none was found, the rarer the asks.

        For batches in which only copies are drafted: asking for each sequence in each step takes up to 5 % of it."""
        self._skips -= 1
        return self._skips >= 0

    def paused(self, output_tokens: int) -> bool:
        return output_tokens < self._resume_at

    def affordable(self, *, entry: float, price: float) -> int | None:
        """Return the longest draft that is right as a whole with at least probability `price`. It has at least one
        token if `rate` reaches `entry`, else none. None: no limit."""
        if self._probing or not self._judged or price <= 0:
            return None
        if self.rate < entry:
            return 0
        return max(1, int(math.log(min(price, 1.0)) / math.log(self.rate))) if self.rate < 1 else None

    def pause(self, reason: Off, *, output_tokens: int, tokens: int) -> None:
        """Pause for `tokens` output tokens, doubled for each pause since acceptance was last good."""
        self._resume_at = output_tokens + tokens * 2**self._strikes
        self._strikes += 1
        self.pauses += 1
        self.reason = reason
        self.length = FIRST_DRAFT
        self._probing = True

    def learn(self, drafted: int, accepted: int, *, output_tokens: int, config: EngineConfig) -> None:
        self._found += (1 - DECAY) * ((drafted > 0) - self._found)
        self._unknown *= DECAY
        self._misses = 0 if drafted else self._misses + 1
        self._skips = min(self._misses, MAX_SKIPS)
        if not drafted:
            return
        self.length = min(2 * max(self.length, drafted), config.max_draft) if accepted == drafted else accepted + 2
        self._probing = False
        if 2 * accepted > drafted:
            self._strikes = 0
        self._right = DECAY * self._right + accepted
        self._judged = DECAY * self._judged + accepted + (accepted < drafted)
        self._prior *= DECAY
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted >= config.acceptance_window:
            self._judge(output_tokens, config)

    def _judge(self, output_tokens: int, config: EngineConfig) -> None:
        hopeless = self._accepted < config.min_acceptance * self._drafted
        self._drafted = self._accepted = 0
        if hopeless:
            detail = f"paused: less than {config.min_acceptance:.0%} of the last drafts was accepted"
            self.pause(Off(OffKind.LOW_ACCEPTANCE, detail), output_tokens=output_tokens, tokens=config.pause_tokens)
        else:
            self._strikes = 0
