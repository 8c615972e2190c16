"""Pace: the draft length of one sequence. It grows while drafts are accepted, shrinks after a rejection, and pauses.

Every sequence has its own pace, because acceptance differs more between texts than between drafters. It starts from
what past drafts of the drafter tell (`engine.population`), which counts less and less beside the sequence's own drafts.
After a pause one draft probes whether acceptance has changed; the length of pauses doubles while it has not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.config import EngineConfig
from paceline.engine.population import FIRST_RATE, NOBODY, POSITIONS, Population
from paceline.types import Off, OffKind

FIRST_DRAFT = 4  # tokens of a sequence's first draft
RECENT_DECAY = 0.8  # weight of the past at each round, for `recent`, depths and the share of drafts that had any token
MAX_SKIPS = 8  # steps without an ask between two drafts of copies that have no token
FIRST_WEIGHT = 3.0  # drafts that a population weighs as much as in a new sequence, as long as it has few of its own
# Chosen by the likelihood of drafts: docs/experiments.md, "Survival from past drafts (2026-11-20)".
KNOWN_WEIGHT = 10.0  # the same of one that has enough
FADING = 0.98  # part of that weight that is left after a round
CARRIED = 0.5  # exponent of a sequence's ratio to past drafts at a level, for the next one; 1 without past drafts
MOST = 0.98  # survival that such a ratio leads to, at most
OWN_DECAY = 0.95  # weight of the past at each draft of the sequence that comes to a position
ALMOST_SURE = 0.999  # survival as which a greater one counts behind the last position
DOUBTED_STRIKES = 3  # pauses that a sequence counts as behind it where past drafts say that none will pay


@dataclass(slots=True)
class Pace:
    length: int = FIRST_DRAFT  # tokens of the next draft
    pauses: int = 0
    reason: Off | None = None  # reason for the last pause
    population: Population = NOBODY  # past drafts that it starts from
    begun: bool = False  # it has taken their numbers
    doubted: bool = False  # the next draft is a first, short probe: past drafts say that it will not pay
    _past: tuple[float, ...] = (FIRST_RATE,) * POSITIONS  # survival by position, of past drafts
    _weight: float = FIRST_WEIGHT  # drafts that they weigh as much as
    _may_doubt: bool = False  # they are enough to be believed before the first draft
    _own_right: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)  # own drafts, see `engine.population`
    _own_judged: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)
    _depth: float = 0.0  # levels of a draft, mean of recent ones
    _found: float = 0.0  # recent drafts that had any token, decayed, as a share
    _unknown: float = 1.0  # weight of other sequences' drafts in that share, decayed
    _drafted: int = 0  # drafted tokens in the current acceptance window
    _accepted: int = 0  # accepted tokens in that window
    _resume_at: int = 0  # output tokens at which the pause ends
    _strikes: int = 0  # pauses since acceptance was last good
    _probing: bool = False  # after a pause: the next draft ignores cost, to measure whether acceptance has changed
    _right: float = 0.0  # recently judged tokens that were right, decayed
    _judged: float = 0.0  # all recently judged tokens, decayed
    _prior: float = FIRST_WEIGHT  # weight of other sequences' drafts beside these, decayed
    _misses: int = 0  # drafts in a row that had no token
    _skips: int = 0  # steps that `skips` will leave out

    def begin(self, population: Population) -> None:
        """Start from past drafts."""
        self.begun, self.population, self._depth = True, population, population.depth
        self._past, self._may_doubt = population.survival(), population.is_known
        self._weight = KNOWN_WEIGHT if self._may_doubt else FIRST_WEIGHT

    def survival(self, levels: int) -> list[float]:
        """Return the probability that a drafted token is right, given that all before it are, on the first `levels`
        levels of a draft: past drafts in general, and own ones as far as there are some.

        Where the sequence is better at a level than past drafts were, it is taken to be better at the next one, too."""
        past, weight, right, judged = self._past, self._weight, self._own_right, self._own_judged
        found, better, carried = [], 1.0, CARRIED if self._may_doubt else 1.0
        for place in range(levels if levels < POSITIONS else POSITIONS):
            assumed = min(past[place] * better, MOST)
            own = (right[place] + weight * assumed) / (judged[place] + weight)
            better = (own / past[place]) ** carried
            found.append(own)
        return found

    def recent(self) -> tuple[float, float]:
        """Return the probabilities that a draft has any token, and that a drafted token is right: by recent drafts
        alone once there are some, before by those for other sequences.

        For rounds on a device, where all sequences pay for a draft that is wrong."""
        others = self.population
        rate = (self._right + others.rate * self._prior) / (self._judged + self._prior)
        return self._found + others.found * self._unknown, rate

    def skips(self) -> bool:
        """Count a step, and return whether no draft is asked for in it: the longer none was found, the rarer the asks.

        For batches in which only copies are drafted: asking for each sequence in each step takes up to 5 % of it."""
        self._skips -= 1
        return self._skips >= 0

    def paused(self, output_tokens: int) -> bool:
        return output_tokens < self._resume_at

    def affordable(self, *, entry: float, price: float, whole: bool = False) -> int | None:
        """Return the longest draft that is right as a whole with at least probability `price`. It has at least one
        token if its `chance` reaches `entry`, else none. None: no limit.

        Before the sequence's first draft nothing is known of it: where past drafts say that none pays, a short one
        probes (`doubted`)."""
        if self._probing or price <= 0 or not (self._judged or self._may_doubt):
            return None
        if self.chance(whole=whole) >= entry:
            return self._longest(price)
        if self._judged:
            return 0
        if not self.doubted:
            self.population.doubt()
        self.doubted, self._strikes = True, DOUBTED_STRIKES
        return FIRST_DRAFT

    def chance(self, *, whole: bool) -> float:
        """Return the probability that a token of a draft is right: its first one, or the mean of its levels where the
        drafter makes `whole` drafts, whose length the engine does not choose."""
        levels = round(self._depth) if whole else 1
        survival = self.survival(levels or 1)
        path = all_paths = survival[0]
        for level in range(1, levels):
            path *= survival[level if level < POSITIONS else -1]
            all_paths += path
        return all_paths / (levels or 1)

    def _longest(self, price: float) -> int:
        """Return the tokens of the longest draft that is right as a whole with at least probability `price`, or 1."""
        path = rate = 1.0
        for level, rate in enumerate(self.survival(POSITIONS)):
            path *= rate
            if path < price:
                return level or 1
        return POSITIONS + int(math.log(price / path) / math.log(min(rate, ALMOST_SURE)))

    def pause(self, reason: Off, *, output_tokens: int, tokens: int) -> None:
        """Pause for `tokens` output tokens, doubled for each pause since acceptance was last good."""
        self._resume_at = output_tokens + tokens * 2**self._strikes
        self._strikes += 1
        self.pauses += 1
        self.reason = reason
        self.length = FIRST_DRAFT
        self._probing = True

    def resume(self) -> None:
        """End the pause: what made drafts too dear has changed."""
        self._resume_at, self._probing = 0, False

    def learn(self, drafted: int, accepted: int, *, output_tokens: int, config: EngineConfig) -> None:
        self._found += (1 - RECENT_DECAY) * ((drafted > 0) - self._found)
        self._unknown *= RECENT_DECAY
        self._misses = 0 if drafted else self._misses + 1
        self._skips = min(self._misses, MAX_SKIPS)
        if not drafted:
            return
        self.length = min(2 * max(self.length, drafted), config.max_draft) if accepted == drafted else accepted + 2
        good = 2 * accepted > drafted
        self._probing, self.doubted = good and (self._probing or self.doubted), False  # another probe behind a good one
        if good:
            self._strikes = 0
        # Inline: this runs for every sequence of a step.
        judged, right, levels = self._own_judged, self._own_right, accepted + (accepted < drafted)
        for level in range(levels):
            place = level if level < POSITIONS else POSITIONS - 1
            right[place] = OWN_DECAY * right[place] + (level < accepted)
            judged[place] = OWN_DECAY * judged[place] + 1
        self._weight *= FADING
        self._depth += (1 - RECENT_DECAY) * (drafted - self._depth) if self._depth else drafted
        self._right = RECENT_DECAY * self._right + accepted
        self._judged = RECENT_DECAY * self._judged + levels
        self._prior *= RECENT_DECAY
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
