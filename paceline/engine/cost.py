"""The cost model: how likely a drafted token must be right to be worth its cost on this machine.

A pass over n rows takes about base + row · n seconds, and a draft of n levels about begin + level · n seconds. Both
lines are fitted to the latest steps, because the slope of a pass changes: it is flat while the pass is bound by memory,
and steep once it is bound by arithmetic. The engine makes *speed* tokens per second. One more drafted token that is
right with probability p makes it faster only if

    p > (seconds of a row + seconds of drafting it) · speed

The right side is the *price* of the token. A token beside others of its level costs its row alone: the *row price*.
Rows of a small pass differ in cost (`engine.row_seconds`), so there each token of a draft has a row price of its own.
The *entry* decides whether to draft at all. It compares with the speed of plain decoding, and counts the average cost
of a level, the beginning of the draft included. All are 0 until steps have been measured, so that drafts are made and
the model can learn.
"""

from __future__ import annotations

from collections import defaultdict

from paceline.engine.row_seconds import RowSeconds

DECAY = 0.95  # weight of the past at each step: about the last twenty steps count
KNOWN_STEPS = 4.0  # weight of the past from which a time is checked for being an outlier
OUTLIER = 2.0  # factor: a time counts at most as this many times the expected one
PRICED_TOKENS = 8  # tokens of a draft whose rows have prices of their own; later ones cost as much as the last of them
MAX_ROW_PRICE = 0.8  # sure tokens are drafted even if their row seems dear, and so it is measured again
DOUBTFUL_PASSES = 8  # passes that the usual price of a row weighs as much as, beside the measured price of this row
MIN_SPREAD = 0.2  # variance of the counts (rows², levels²) below which no slope is fitted


class Line:
    """A least-squares line of seconds over a count (rows, or levels), weighted towards the latest points.

    The slope is at least 0, and at most the average seconds per unit of the count."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope: float | None = None  # seconds of one more unit, as last fitted; None: never fitted

    def add(self, x: float, seconds: float) -> float:
        """Add a point, and return its seconds as they count. Other work on the machine causes outliers: a time is cut
        to OUTLIER times the expected one."""
        if self._weight >= KNOWN_STEPS:
            seconds = min(
                seconds, OUTLIER * (self._y + (self.slope or 0.0) * (x * self._weight - self._x)) / self._weight
            )
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * seconds
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread >= MIN_SPREAD:
            self.slope = min(max((self._xy / self._weight - x * y) / spread, 0.0), y / x)
        return seconds

    @property
    def share(self) -> float:
        """Average seconds per unit of the count; 0 before any point."""
        return self._y / self._x if self._x else 0.0


class CostModel:
    def __init__(self) -> None:
        self._passes = Line()
        self._small_passes = RowSeconds()
        self._drafting: defaultdict[str, Line] = defaultdict(Line)  # drafter → seconds over the depth of a draft
        self._spent: dict[str, tuple[float, float]] = {}  # drafter → seconds of all its drafts, and their levels
        self._breadth: dict[str, float] = {}  # drafter → tokens per level of a draft
        self._rows = self._tokens = self._sequences = self._step_seconds = self._draft_seconds = 0.0
        self._entries: dict[str, float] = {}  # `entry` by drafter, since the last observation

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
        """Learn from a step in which every sequence was decoding."""
        self._entries.clear()
        self._passes.add(rows, pass_seconds)
        self._small_passes.add(rows, pass_seconds)
        self._rows = DECAY * self._rows + rows
        self._tokens = DECAY * self._tokens + tokens
        self._sequences = DECAY * self._sequences + sequences
        self._step_seconds = DECAY * self._step_seconds + step_seconds
        self._draft_seconds = DECAY * self._draft_seconds + draft_seconds

    def observe_draft(
        self, drafter: str, *, tokens: int, depth: int, seconds: float, passes: int | None = None
    ) -> None:
        """Learn from the drafts of a step: `depth` levels with `tokens` tokens, summed over its sequences. `passes`:
        those that they took, if not one for each level. Drafts that took none say nothing of what a level costs."""
        self._entries.clear()
        if passes != 0:
            seconds = self._drafting[drafter].add(max(depth if passes is None else passes, 1), seconds)
        spent, levels = self._spent.get(drafter, (0.0, 0.0))
        self._spent[drafter] = DECAY * spent + seconds, DECAY * levels + depth
        if depth:
            self._breadth[drafter] = DECAY * self._breadth.get(drafter, 1.0) + (1 - DECAY) * tokens / depth

    def forget(self, drafter: str) -> None:
        """Forget what drafts of a drafter cost: it was unloaded, and another one may get its name."""
        for known in (self._drafting, self._spent, self._breadth, self._entries):
            known.pop(drafter, None)

    @property
    def row_seconds(self) -> float:
        """Seconds of one more row of a pass; 0: not measured."""
        return self._passes.slope or 0.0

    def observe_rows(self, rows: int, seconds: float, *, beside: float = 0.0) -> None:
        """Learn from a pass that was made to be timed: what rows cost, relative to each other. `beside`: see
        `RowSeconds.time`."""
        self._small_passes.time(rows, seconds, beside=beside)

    def doubling(self, sequences: int) -> float | None:
        """Share of a plain pass by which it takes longer if each of `sequences` has a second row; None: unknown."""
        if not self._small_passes.knows:
            return None
        return self._small_passes.seconds(2 * sequences) / self._small_passes.seconds(sequences) - 1

    def price(self, drafter: str) -> float:
        """Lowest probability of being right at which one more drafted token pays, if it adds a level to the draft."""
        drafting, row = self._drafting.get(drafter), self.row_price
        if drafting is None or not row:
            return row
        return row + (drafting.share if drafting.slope is None else drafting.slope) * self._tokens / self._step_seconds

    @property
    def knows_rows(self) -> bool:
        """True if steps of different numbers of rows were measured."""
        return self._passes.slope is not None

    @property
    def plain_speed(self) -> float:
        """Tokens a second that steps without drafts would make; 0: unknown."""
        row = self._passes.slope
        if row is None:
            return 0.0
        plain = self._step_seconds - self._draft_seconds - row * (self._rows - self._sequences)
        return self._sequences / plain if plain > 0 else 0.0

    def share_of(self, plain_speed: float) -> float:
        """Return a speed without drafts, relative to that of the latest steps; at most 1, 1 if one is unknown."""
        known = self._tokens and self._step_seconds
        return min(plain_speed * self._step_seconds / self._tokens, 1.0) or 1.0 if known else 1.0

    @property
    def row_price(self) -> float:
        """Lowest probability of being right at which one more token pays on a level that is drafted anyway."""
        row = self._passes.slope
        return 0.0 if row is None or not self._step_seconds else row * self._tokens / self._step_seconds

    @property
    def prices_rows(self) -> bool:
        """True if `row_prices` are known."""
        return self._small_passes.knows and self._step_seconds > 0

    def row_prices(self, sequences: int) -> tuple[float, ...]:
        """Lowest probability of being right at which the first, second … drafted token of each sequence pays for its
        row, if all sequences draft as many. (): unknown.

        After few passes a row's price is near the usual one, or a single slow pass would keep such rows from being
        measured again. Where no step has shown the usual one, the passes that were timed count alone."""
        if not self.prices_rows:
            return ()
        measured, usual = self._small_passes, self.row_price
        doubtful = DOUBTFUL_PASSES if self.knows_rows else 0
        speed = self._tokens / self._step_seconds / sequences
        prices, less = [], measured.seconds(sequences)
        for rows in range(2 * sequences, (PRICED_TOKENS + 2) * sequences, sequences):
            passes, more = measured.passes.get(rows, 0), measured.seconds(rows)
            known = passes / (passes + doubtful) if doubtful else 1.0
            price = usual + ((more - less) * speed - usual) * known
            prices.append(min(max(price, 0.0), MAX_ROW_PRICE))
            less = more
        return tuple(prices)

    def entry(self, drafter: str) -> float:
        """Lowest probability of being right at which drafting is faster than plain decoding."""
        if drafter not in self._entries:
            self._entries[drafter] = self._compute_entry(drafter)
        return self._entries[drafter]

    def _compute_entry(self, drafter: str) -> float:
        row, (spent, levels) = self._passes.slope, self._spent.get(drafter, (0.0, 0.0))
        if row is None:
            return 0.0
        level = spent / max(levels, 1.0)
        return (row * self._breadth.get(drafter, 1.0) + level) * self.plain_speed or 1.0
