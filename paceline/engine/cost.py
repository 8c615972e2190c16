"""What a drafted token costs on this machine, and so how likely it must be right to be worth verifying.

A pass over n rows takes about base + row · n seconds; the line is fitted to the latest steps, since it is flat while
memory sets the pace and steep once arithmetic does. The engine makes `speed` tokens a second. One more drafted token
that is right with probability p makes it faster only if

    p > (seconds of a row + seconds of drafting it) · speed

and that is its price. Whether to draft at all is decided at the speed of plain decoding, since that is what is left
without drafts: the *entry*. Until there is something to go by both are 0: drafting is how the model learns.
"""

from __future__ import annotations

DECAY = 0.95  # weight of the past, a step: about the last twenty count
MIN_SPREAD = 0.2  # variance of rows below which a line through them means nothing


class CostModel:
    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0
        self._tokens = self._sequences = self._step_seconds = self._draft_seconds = 0.0
        self._row: float | None = None  # seconds a row
        self._drafting: dict[str, float] = {}  # seconds a drafted token, by drafter

    def observe(
        self,
        *,
        sequences: int,
        rows: int,
        tokens: int,
        pass_seconds: float,
        step_seconds: float,
        draft_seconds: float = 0.0,
    ) -> None:
        """A step in which every sequence was decoding."""
        self._weight = DECAY * self._weight + 1
        self._rows = DECAY * self._rows + rows
        self._rows_squared = DECAY * self._rows_squared + rows * rows
        self._seconds = DECAY * self._seconds + pass_seconds
        self._products = DECAY * self._products + rows * pass_seconds
        self._tokens = DECAY * self._tokens + tokens
        self._sequences = DECAY * self._sequences + sequences
        self._step_seconds = DECAY * self._step_seconds + step_seconds
        self._draft_seconds = DECAY * self._draft_seconds + draft_seconds
        self._fit()

    def observe_draft(self, drafter: str, *, tokens: int, seconds: float) -> None:
        each = seconds / max(tokens, 1)
        self._drafting[drafter] = each + DECAY * (self._drafting.get(drafter, each) - each)

    def price(self, drafter: str) -> float:
        """The probability of being right from which on one more drafted token pays."""
        return self._seconds_of(drafter) * self._tokens / self._step_seconds if self._step_seconds else 0.0

    def entry(self, drafter: str) -> float:
        """The same where nothing is drafted yet."""
        if self._row is None:
            return 0.0
        plain = self._step_seconds - self._draft_seconds - self._row * (self._rows - self._sequences)
        return self._seconds_of(drafter) * self._sequences / plain if plain > 0 else 1.0

    def _seconds_of(self, drafter: str) -> float:
        return 0.0 if self._row is None else self._row + self._drafting.get(drafter, 0.0)

    def _fit(self) -> None:
        """Least squares; a row costs no less than nothing and no more than its share of the pass."""
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_squared / self._weight - rows * rows
        if spread >= MIN_SPREAD:
            slope = (self._products / self._weight - rows * seconds) / spread
            self._row = min(max(slope, 0.0), seconds / rows)
