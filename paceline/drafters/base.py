"""What a drafter is: something that is told when a sequence starts, is asked for drafts, and sees what became of them.

A drafter may be wrong, slow or broken: that costs speed, never text (law 8; `drafters.guard` sees to it). It knows
nothing of queues, and it never sees a token before the target has committed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from paceline.draft import Draft
from paceline.sampling.sampler import Sampler
from paceline.types import Off, Rule


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that wants a draft of at most `max_draft` tokens after its committed `tokens`."""

    key: int  # the sequence, from start to stop
    lane: int
    tokens: np.ndarray  # int32 [committed], a view: do not keep it
    max_draft: int
    sampler: Sampler
    rule: Rule = Rule.COUPLED
    p_min: float | None = None  # end the draft once you believe in all of it with less; None: your own limit
    price: float = 0.0  # how likely one more token must be right to be worth drafting and verifying
    row_price: float = 0.0  # the part of it that verifying costs: all that a token costs beside others of its level
    left: int = 1 << 30  # tokens that the answer may still have, at most
    predicted: tuple[int, ...] = ()  # what the request's prediction goes on with

    def within(self, most: int) -> Ask:
        """The same of at most so many tokens. Every step asks: `dataclasses.replace` takes several times as long."""
        if self.max_draft <= most:
            return self
        rest = self.sampler, self.rule, self.p_min, self.price, self.row_price, self.left, self.predicted
        return Ask(self.key, self.lane, self.tokens, most, *rest)


class Seen(NamedTuple):
    """What the target computed of a sequence in a step and committed: positions `start` …"""

    key: int
    start: int
    rows: Sequence[int]  # of the step's hidden states, one a position


class Drafter(Protocol):
    name: str
    max_draft: int  # a longer draft never pays with this drafter
    inline: bool  # True: returns in bounded time, so that it may run on the engine's own thread
    # ends_drafts: bool, where a drafter has it: True, it ends drafts by the `price` of an ask; else the engine says how
    # long they are

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        """A sequence with these committed tokens begins, or comes back after a preemption."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft for each ask, in order; an empty one where there is nothing to say."""

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        """Of this drafter's last draft `accepted` tokens, from its beginning, are now committed; `tokens` are all
        committed ones."""

    def stop(self, key: int) -> None:
        """The sequence ended or was preempted."""


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states. It is fed all that are computed while it drafts for a sequence;
    positions that came from the prefix cache have none and are left out."""

    taps: Sequence[int]  # where they are taken, see `kernels.base`

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        """After a step, once what it brought is committed: at least one more token than positions seen. The hidden
        states, float32 [rows, taps * hidden] in the order of the drafter's taps, are of all rows of the step; they are
        gone when the next one begins. `crowded`: so many sequences run that nobody drafts; it should cost nothing.

        Returns the sequences that it can no longer draft for, and why; it is fed no more of these."""

    def knows(self, page: int) -> bool:
        """Whether it can do without the hidden states of a page of KV memory whose content is known: if not, the target
        computes it again."""
