"""The interface of a drafter: it is told when a sequence starts, is asked for drafts, and sees which were accepted.

A drafter may be wrong, slow or broken: that costs speed, never text (law 8; `drafters.guard` sees to it). It knows
nothing of queues, and it never sees a token before the target has committed it.

The calls for one sequence come in this order, all on one thread:

    start   propose (observe) (hear)   propose (observe) (hear)   …   (learn) stop

Beside a target on a GPU a step is in flight while the drafter is asked. Then a draft is asked for before the draft
before it has been observed, and it must be longer: the step in flight commits the first tokens of it, if they are
right, and the next step verifies the rest. A draft that the step in flight contradicts is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.draft import Draft
from paceline.sampling.sampler import Sampler
from paceline.types import Off, Rule


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that wants a draft of at most `max_draft` tokens after its committed `tokens`."""

    key: int  # names the sequence from start to stop
    lane: int  # row of the sequence in the engine's tables; only drafters with KV memory of their own need it
    tokens: np.ndarray  # int32 [committed], a read-only view, valid only during the call
    max_draft: int  # tokens, at least 1; beside a GPU it includes what the step in flight may commit
    sampler: Sampler  # the request's sampling: temperature, filters, seed, penalties, grammar
    rule: Rule = Rule.COUPLED  # acceptance rule; if `rule.wants_probs`, sampled drafts must have `probs`
    p_min: float | None = None  # the request's confidence below which a draft ends; None: the drafter's own limit
    price: float = 0.0  # probability of acceptance at which one more drafted token pays for itself; 0: not measured
    row_price: float = 0.0  # part of `price` that verification costs: the price of a token beside others of its level
    row_prices: tuple[float, ...] = ()  # prices of the first, second … token's row; (): only `row_price` is known
    left: int = 1 << 30  # tokens that the answer may still have, at most
    predicted: tuple[int, ...] = ()  # next tokens of the request's prediction, at most `max_draft`
    matched: int = 0  # number of last tokens that the prediction has right before `predicted`
    alone: bool = True  # the request has no other drafter
    salt: str = ""  # only requests with the same one may share what a drafter remembers
    plain_speed: float = 0.0  # tokens a second that the engine would make without drafts; 0: not measured
    plain_share: float = 1.0  # that speed, relative to the engine's speed now, by which prices are made
    copies_only: bool = False  # draft only tokens that are looked up, and only if they surely pay for their rows

    def within(self, most: int) -> Ask:
        """Return this ask with `max_draft` at most `most`.

        Every step calls it: `dataclasses.replace` takes several times as long."""
        if self.max_draft <= most:
            return self
        prices = self.price, self.row_price, self.row_prices
        rest = self.sampler, self.rule, self.p_min, *prices, self.left, self.predicted, self.matched, self.alone
        speeds = self.plain_speed, self.plain_share
        return Ask(self.key, self.lane, self.tokens, most, *rest, self.salt, *speeds, self.copies_only)


class Ended(NamedTuple):
    """A sequence that came to its end: `tokens` from `prompt_length` on are the answer."""

    tokens: np.ndarray  # int32, a read-only view, valid only during the call
    prompt_length: int
    salt: str  # only requests with the same one may share what a drafter remembers


class Seen(NamedTuple):
    """The positions of one sequence that the target computed in a step and committed, from `start` on."""

    key: int
    start: int
    rows: Sequence[int]  # rows of the step's hidden states, one for each position


class Verified(NamedTuple):
    """The target's logits of one sequence in a step: after its last token, and after each drafted one."""

    key: int
    salt: str  # only requests with the same one may share what a drafter remembers
    token: int  # last committed token before the step
    draft: Draft  # that was verified, whoever drafted it
    logits: Tensor  # float32 [1 + len(draft), vocab] before any sampling parameter, valid only during the call
    best: Sequence[int]  # likeliest token of each row


class Drafter(ABC):
    """A drafter that runs on the host. Derive from it, give it a `name`, and write `propose`."""

    name: str  # used by requests, statistics and messages
    max_draft: int = 16  # tokens; a step never verifies more
    inline: bool = True  # every call returns in bounded time; False: run on a thread of its own, with a time limit
    ends_drafts: bool = False  # sets draft lengths itself, by `Ask.price`; False: the engine does, by past acceptance
    weighs_cost: bool = False  # decides itself whether a draft pays; True: the engine never pauses it for its cost
    copies: bool = False  # looks tokens up, at next to no cost: may draft where drafts of a model do not pay
    needs_prediction: bool = False  # drafts only for requests with a prediction, and before their other drafter
    shares_kv: bool = False  # drafts on the target's KV memory: it must hold all committed tokens but the last one
    unfit: str | None = None  # why its drafts cannot pay here, so that it is never asked; None: they may
    hears_logits: bool = False  # hears what the target said after each step of its sequences; only on the host
    max_context: int | None = None  # tokens of a sequence behind which it drafts nothing; None: as many as the target
    taps: Sequence[int] = ()  # places of the target whose hidden states it reads (`kernels.base`): a FeatureDrafter

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        """Begin a sequence with these committed tokens, or take it up again after a preemption."""
        return

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Return one draft for each ask, in order; `EMPTY` for no draft."""

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        """Learn how many tokens of a draft were right, from its beginning; `tokens` are all committed ones.

        Called after the step that verified a draft of this drafter, unless the draft was empty or dropped, or the
        sequence ended with it. Tokens that were committed otherwise (plain steps, another drafter's drafts, a grammar
        that left no choice) are not announced: the next ask shows them."""
        return

    def hear(self, verified: Sequence[Verified]) -> None:
        """Hear what the target said in a step, if it `hears_logits`. Called after `observe`, drafted or not, but for
        sequences that ended with the step. Not beside a GPU: logits stay there."""
        return

    def learn(self, ended: Ended) -> None:
        """Learn from a whole answer. Called before `stop` if the sequence was not aborted or preempted."""
        return

    def stop(self, key: int) -> None:
        """Forget a sequence: it ended, or it was preempted."""
        return

    def close(self) -> None:
        """Let go of memory, threads and files. Called once, when the drafter is unloaded: no other call follows."""
        return


class FeatureDrafter(Drafter):
    """A drafter that reads the target's hidden states at its `taps`.

    It is fed the states of every position that is computed while it drafts for a sequence. Positions that came from the
    prefix cache are not computed: they have no states and are left out."""

    @abstractmethod
    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        """Take hidden states of a step, or of several in which nobody drafted.

        They are float32 [rows, taps * hidden], in the order of `taps`.

        Called once the tokens of these steps are committed, so that the token after each position seen is known.
        `features` is valid during the call, and may have rows that were not committed; beside a GPU it is in the host's
        memory.
        `crowded`: too many sequences run for any to draft; do no expensive work then.

        Return the sequences that it can no longer draft for, with reasons; their states are not fed any more."""

    @abstractmethod
    def knows(self, page: int) -> bool:
        """Tell whether it can do without the hidden states of a page from the prefix cache.

        If not, the target computes the page again."""
