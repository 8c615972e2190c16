"""Whether a canary is faster or slower: a test on pairs of requests that may be looked at after every one.

As soon as both arms have ended requests of a batch size and kind of work, all that ended since the pair before become
a pair: d = mean log speed of the canary's − that of the control's, within ±BOUND. So pairs share no request and no
stretch of time, and a drift of the machine's speed adds no bias. If the canary is no faster than `promote_at`, the mean
of d given all pairs before is at most m = log promote_at. Then for 0 ≤ λ < 1 / (BOUND + |m|) the wealth

    Π (1 + λ (d − m))

of a gambler who bets on "faster" is a supermartingale, and so is the mean over several λ. By Ville's inequality it ever
reaches 1 / ERROR with a probability of at most ERROR, however often one looks. The bet on "slower than `rollback_at`"
is the same with the signs changed.

Speeds are known within bounds (`paceline.arms.ArmSpeed`). The bet on "faster" takes the canary's lowest speed and the
control's highest, the bet on "slower" the other way round.

Everything here is a sum, so the sums of several servers are added up (docs/adr/0032).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.arms import CANARY, ArmSpeed

BOUND = 0.5  # of a pair's log ratio: a pair that is further off says no more than this
STAKES = (0.05, 0.1, 0.2, 0.4, 0.7, 0.95)  # λ, as parts of the largest
ERROR = 0.02  # probability of promoting what is no faster than promote_at; the same of rolling back
NEEDED = math.log(1 / ERROR)  # log wealth that decides
MIN_TOKENS = 8  # of a request in decoding steps; a shorter one says little
MAX_PENDING = 8  # requests of an arm that wait for their pair, of one kind and batch size

Totals = Mapping[str, float]  # sums by name; those of several servers may be added
Speed = tuple[float, float]  # lowest and highest log speed of a request


@dataclass(slots=True)
class Pairing:
    """Requests of one kind of work and batch size that have no pair yet."""

    canary: deque[Speed] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    control: deque[Speed] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))

    def add(self, arm: str, speed: Speed) -> Speed | None:
        """Add a request; return the lowest and highest log ratio of a pair, if this completes one."""
        (self.canary if arm == CANARY else self.control).append(speed)
        if not (self.canary and self.control):
            return None
        canary, control = [*self.canary], [*self.control]
        self.canary.clear()
        self.control.clear()
        low = _mean([low for low, _ in canary]) - _mean([high for _, high in control])
        return low, _mean([high for _, high in canary]) - _mean([low for low, _ in control])


class Evidence:
    """Sums of the pairs of one server, since they were last taken away."""

    def __init__(self, *, promote_at: float, rollback_at: float) -> None:
        self.totals: dict[str, float] = {}
        self._faster, self._slower = math.log(promote_at), math.log(rollback_at)
        self._pairings: defaultdict[tuple[int, str], Pairing] = defaultdict(Pairing)

    def add(self, arm: str, kind: str, speed: ArmSpeed | None) -> None:
        """Add a request that has ended."""
        if speed is None or speed.tokens < MIN_TOKENS or speed.least <= 0:
            return
        own = math.log(speed.tokens / speed.most), math.log(speed.tokens / speed.least)
        pair = self._pairings[speed.batch, kind].add(arm, own)
        if pair is not None:
            self._bet(*pair)

    def _bet(self, low: float, high: float) -> None:
        low, high = (min(max(each, -BOUND), BOUND) for each in (low, high))
        self.count({"pairs": 1.0, "low": low, "high": high})
        for i, stake in enumerate(STAKES):
            faster = stake * (low - self._faster) / (BOUND + abs(self._faster))
            slower = stake * (self._slower - high) / (BOUND + abs(self._slower))
            self.count({f"faster.{i}": math.log1p(faster), f"slower.{i}": math.log1p(slower)})

    def count(self, more: Totals) -> None:
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Take the sums away, to add them to those of all servers."""
        taken, self.totals = self.totals, {}
        return taken


def plus(totals: Totals, more: Totals) -> dict[str, float]:
    """Add sums up."""
    return {**totals, **{name: totals.get(name, 0.0) + value for name, value in more.items()}}


def wealth(totals: Totals, bet: str) -> float:
    """Return the log wealth of a bet: "faster" or "slower"."""
    each = [totals.get(f"{bet}.{i}", 0.0) for i in range(len(STAKES))]
    most = max(each)
    return most + math.log(_mean([math.exp(one - most) for one in each]))


def ratio(totals: Totals) -> tuple[float, float] | None:
    """Return the canary's speed over the control's, lowest and highest; None: there is no pair yet."""
    pairs = totals.get("pairs")
    return (math.exp(totals["low"] / pairs), math.exp(totals["high"] / pairs)) if pairs else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
