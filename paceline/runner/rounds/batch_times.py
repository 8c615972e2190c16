"""Running averages of the seconds that rounds take, by the size of their batch."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9  # weight of the past in a running average
FIRST = 3  # measurements of which the least counts: other work on the machine can only make a round longer
OUTLIER = 2.0  # factor: a later time counts at most as this many times the average


@dataclass(slots=True)
class Average:
    seconds: float
    drafting: int = 0  # sequences that drafted in the latest round that counts
    count: int = 1

    def add(self, seconds: float, *, drafting: int = 0) -> None:
        """Add a round. One in which far fewer sequences draft, such as a probe, is shorter: it does not count."""
        if 2 * drafting < self.drafting:
            return
        self.drafting = drafting
        self.count += 1
        if self.count <= FIRST:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (1 - DECAY) * (min(seconds, OUTLIER * self.seconds) - self.seconds)


class BatchTimes:
    """Seconds of one kind of round."""

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}  # by sequences of the batch

    def learn(self, batch: int, seconds: float, *, drafting: int = 0) -> None:
        """Learn from a round; `drafting`: how many of its sequences draft."""
        if batch in self._averages:
            self._averages[batch].add(seconds, drafting=drafting)
        else:
            self._averages[batch] = Average(seconds, drafting)

    def near(self, batch: int) -> float | None:
        """Return the seconds of the measured batch next in size; None: none is within a quarter."""
        if batch in self._averages:
            return self._averages[batch].seconds
        near = [(abs(size - batch), size) for size in self._averages if abs(size - batch) <= batch // 4]
        return self._averages[min(near)[1]].seconds if near else None
