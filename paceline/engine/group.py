"""Steps with one drafter, about as many sequences, and one kind of requests: when to run plain, and the guard.

The share of drawn steps follows from what they cost: a plain step makes 1 / ratio of the tokens of a speculative one,
so share · (1 − 1 / ratio) of the tokens per second are lost. The guard turns drafting off where the ratio lies below 1,
and tries again after rests that double. Where drafts are not expected to pay, the first rest comes before anything was
measured. Until the ratio is known, runs come close to each other, in a trial after a rest closer than at the beginning.
More than two sequences begin with a trial: it depends on the machine whether drafts pay.
"""

from __future__ import annotations

import math
import random

from paceline.engine.ratio import DECAY, MIN_BLOCKS, Ratio
from paceline.engine.stats import Measured
from paceline.types import Off, OffKind, Speedup

RUN, UNCOUNTED = 4, 1  # plain steps of a run; steps at its beginning that count nowhere
COST = 0.006  # share of the tokens per second that drawn steps may cost; with the first runs it stays below 0.01
MAX_SHARE = 0.04  # of steps that are drawn, where plain ones cost little or nothing
FIRST_GAP, TRIAL_GAP = 128, 32  # steps between two runs until the ratio is known: at the beginning, and after a rest
OUTLIER = 4.0  # factor: the time of a step counts at most as this many times the mean of its side
FIRST_REST, MAX_REST = 2048, 1 << 17  # steps of the guard's first rest, and of its longest
SLOW, SLOW_BLOCKS = 0.98, 32  # ratio below which the guard turns drafting off after so many blocks, at any interval
SURE_BATCH = 2  # sequences up to which a group does not begin with a trial
HOPELESS, HOPELESS_BLOCKS = 0.93, 4  # ratio below which a trial ends after so many blocks already
PLAIN_SHARE = 0.3  # part by which the plain steps of a block move the time that a plain step takes
FADE_STEPS = 8192  # steps after which a group's weight beside the others has fallen to 1/e


def batch_label(bits: int) -> str:
    """Return the batch sizes whose predecessor has so many bits: 1, 2, 3-4, 5-8 …"""
    first, last = (1 << bits >> 1) + 1, 1 << bits
    return str(last) if first >= last else f"{first}-{last}"


class Side:
    """Steps of a group's current block that were drawn, or those that were not."""

    __slots__ = ("_seconds", "_steps", "accepted", "drafted", "group", "limit", "seconds", "sequences", "steps")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.limit = math.inf  # seconds as which a step counts at most
        self._steps = self._seconds = 0.0  # of blocks before, decayed
        self.clear()

    def clear(self) -> None:
        self.steps = self.sequences = self.accepted = self.drafted = 0
        self.seconds = 0.0

    def add(self, *, sequences: int, accepted: int, drafted: int, seconds: float) -> None:
        self.steps += 1
        self.sequences += sequences
        self.accepted += accepted
        self.drafted += drafted
        self.seconds += seconds if seconds < self.limit else self.limit

    @property
    def tokens(self) -> int:
        return self.sequences + self.accepted

    def end_block(self) -> None:
        self._steps, self._seconds = DECAY * self._steps + self.steps, DECAY * self._seconds + self.seconds
        self.limit = OUTLIER * self._seconds / self._steps
        self.clear()


class Group:
    def __init__(
        self,
        drafter: str,
        bits: int,
        *,
        sampled: bool = False,
        guards: bool,
        generator: random.Random,
        copies: bool = False,
    ) -> None:
        """`bits`: of the batch size less 1. `sampled`: tokens of a sequence are. `copies`: one of its drafters looks
        tokens up."""
        self.most = 1 << bits  # sequences of its largest step
        self.speculative, self.plain = Side(self), Side(self)
        self.off: Off | None = None  # why nothing is drafted; None: the guard is not on
        self.waits = False  # nothing was measured yet, because drafts are not expected to pay
        self.copies: Group | None = None  # those of its steps in which only copies were drafted; None: there were none
        self._drafter = drafter
        self._bits, self._copies = bits, copies
        self._batch = batch_label(bits)
        self._sampled = sampled
        self._guards = guards
        self._generator = generator
        self._weight, self._weighed = 0.0, 0  # decayed seconds of speculative steps, and the step at which it was taken
        self._failed = 0  # trials in a row that ended in a rest
        self.plain_seconds = 0.0  # of a plain step, in the latest blocks; 0: not measured
        self.begin()

    def wait(self, off: Off) -> None:
        """Draft nothing for now, for this reason: the first trial comes after a rest."""
        self.waits, self.off = True, off
        self._rest, self._failed = FIRST_REST, 1
        self._tell(None)

    def begin(self) -> None:
        """Begin to measure, with nothing known."""
        if self.waits and self._rest > 0:
            self._failed = 0  # it is expected to pay by now
        self.waits, self.off = False, None
        self._ratio: Ratio | None = None  # None: the first block, which only shows how long steps take
        self._counts = [0.0] * 3  # sequences of speculative steps, drafted and accepted tokens, decayed
        self._slow = 0  # blocks in a row with a ratio below SLOW
        self._rest = 0  # steps until the guard tries again
        self._run = 0  # steps of the run that were drawn
        self.speculative.clear()
        self.plain.clear()
        self._first_gap = TRIAL_GAP if self._failed or self.most > SURE_BATCH else FIRST_GAP
        self._plan_gap(self._first_gap)
        self._tell(None)

    def draw(self, step: int) -> int:
        """Count a step that may be drawn; `step`: its number. Return its place in a run of drawn steps, 1 for the
        first; 0: it is not drawn."""
        if self._gap:
            self._gap -= 1
            if self._gap == self._middle:
                self._end_block(step)
            return 0
        self._run += 1
        if self._run < RUN:
            return self._run
        self._run = 0
        found = self.state.speedup
        self._plan_gap(self._first_gap if found is None else _gap_after(found))
        return RUN

    def side_of(self, place: int) -> Side | None:
        """Return the side that a step counts on, by its place in a run; None: nowhere."""
        if not place:
            return self.speculative
        return self.plain if place > UNCOUNTED else None

    def rest(self) -> Off | None:
        """Count a step in which the guard is on, and return why nothing is drafted. None: a trial begins."""
        self._rest -= 1
        if self._rest <= 0:
            self.begin()
        return self.off

    def resting(self) -> Group | None:
        """Return the group of steps in which only copies are drafted, while this one must not draft. None: they must
        not be drafted either, or nobody copies."""
        if self.copies is None and self._copies:
            name = f"{self._drafter} (copies)"
            self.copies = Group(name, self._bits, sampled=self._sampled, guards=self._guards, generator=self._generator)
        if self.copies is None or (self.copies.off is not None and self.copies.rest() is not None):
            return None
        return self.copies

    def weight(self, step: int) -> float:
        """Return the seconds of speculative steps lately, as seen from a step of this number."""
        return self._weight * math.exp((self._weighed - step) / FADE_STEPS)

    def _plan_gap(self, steps: float) -> None:
        self._gap = max(int(steps * (0.5 + self._generator.random())), 2)  # speculative steps until the next run
        self._middle = self._gap // 2  # the block ends half-way, so that a drift within it cancels out

    def _end_block(self, step: int) -> None:
        """Add the block to what is known. A block in which one side has no tokens or no time goes on."""
        spec, plain = self.speculative, self.plain
        if not (spec.tokens and spec.seconds and plain.tokens and plain.seconds):
            return
        self._weight, self._weighed = self.weight(step) + spec.seconds, step
        share = PLAIN_SHARE if self.plain_seconds else 1.0
        self.plain_seconds += share * (plain.seconds / plain.steps - self.plain_seconds)
        if self._ratio is None:
            self._ratio, found = Ratio(), None
        else:
            self._ratio.add((spec.tokens, spec.seconds, plain.tokens, plain.seconds))
            found = self._ratio.speedup()
        counts = spec.sequences, spec.drafted, spec.accepted
        self._counts = [DECAY * past + now for past, now in zip(self._counts, counts, strict=True)]
        spec.end_block()
        plain.end_block()
        if self._guards:
            if found is not None:
                self._judge(found, self._ratio.blocks)
            elif self._is_hopeless(self._ratio):
                self._give_up(f"{self._ratio.value:.2f} ×")
        self._tell(found)

    def _is_hopeless(self, ratio: Ratio) -> bool:
        """Return whether a trial can end before there is an interval."""
        return self.most > SURE_BATCH and ratio.blocks > HOPELESS_BLOCKS - 0.5 and ratio.value < HOPELESS

    def _judge(self, found: Speedup, blocks: float) -> None:
        """Turn drafting off if the ratio is below 1: surely, for long, or at the end of a trial after a rest."""
        self._slow = self._slow + 1 if found.ratio < SLOW else 0
        fails_trial = self._failed and self.state.speedup is None and found.ratio < 1
        if found.high < 1 or self._slow >= SLOW_BLOCKS or fails_trial:
            self._give_up(str(found))
        elif blocks > 4 * MIN_BLOCKS:
            self._failed = 0

    def _give_up(self, ratio: str) -> None:
        """Turn drafting off for a rest, longer after each trial that failed."""
        self._rest = min(FIRST_REST << self._failed, MAX_REST)
        self._failed += 1
        detail = f"paused: {ratio} as fast as plain decoding, measured at batch size {self._batch}"
        self.off = Off(OffKind.MEASURED_SLOWER, detail)

    def _tell(self, found: Speedup | None) -> None:
        sequences, drafted, accepted = self._counts
        self.state = Measured(
            drafter=self._drafter,
            batch=self._batch,
            kind="sampled" if self._sampled else "greedy",
            speedup=found,
            runs=0 if self._ratio is None else round(self._ratio.blocks),
            tokens_per_step=(sequences + accepted) / sequences if sequences else None,
            acceptance=accepted / drafted if drafted else None,
            off=None if self.off is None else self.off.detail,
        )


def _gap_after(found: Speedup) -> float:
    """Return the mean number of steps between two runs with which drawn steps cost no more than COST."""
    share = min(MAX_SHARE, COST / (1 - 1 / found.ratio)) if found.ratio > 1 else MAX_SHARE
    return RUN / share - RUN
