"""Steps that a device runs without the host: the interface of `Rounds`, and of the drafters that run inside them.

A step is launched and collected. `launch` says which sequences take part and returns at once. The device reads the
chunks of prompts, then runs one *round* over all seats: draft, verify, accept. Tokens, lengths and page tables live on
the device (`runner.rounds.device_state`), so that a step can be launched before the previous one has ended. `collect`
returns the outcome.

    host      launch 1 │ launch 2 │ collect 1 │ launch 3 │ collect 2 │ …
    device             │ step 1 ······│ step 2 ········│ step 3 ······

A step with *masked* seats is launched in two parts, because their masks depend on the step before. The device drafts
and verifies at once. It draws when `draw` brings the masks, which the host computes meanwhile.

    host      launch 2 │ collect 1 │ drafts 2, masks │ draw 2 │ launch 3 │ collect 2 │ …
    device    step 1 ··│ draft and verify 2 ···············  │ draw 2 │ draft and verify 3 ···

Three things always hold. Steps take effect in the order of their launches; `write` and `set_pages` before the launches
that follow them. Nothing but `wait`, `collect` and `drafts` waits for the device. A device writes only to pages in the
lane's part of the page table, or to the scratch page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from paceline.kernels.base import Forward
from paceline.kernels.lookup_reference import DRAFTED, SIZE_SHIFT
from paceline.kernels.offer_reference import HEADER
from paceline.rules import Rule
from paceline.runner.heads.protocol import Head, ReadingHead
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet
from paceline.types import Logprob

SPARE_OFFERED = 8  # tokens of an offer behind its draft, in which a device looks for its place after an edit
Ticket = Any
"""The handle that a `launch` returns for its `collect`."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A continuation that the host proposes for positions `start`, start + 1, … of a sequence.

    It may begin before the sequence's true end, because a step may be in flight. The device compares that part with
    its own committed tokens: if they are equal the rest is the draft, else the sequence decodes plainly. An offer with
    a `near` is from a known text: the device then looks for the last committed tokens in it, and drafts what follows.
    """

    start: int
    tokens: tuple[int, ...]
    near: int = 0  # tokens from the expected place, within which a match of one token is enough; 0: do not look


class Seat(NamedTuple):
    """One decoding sequence of a round."""

    lane: int
    max_draft: int  # drafted tokens, at most; 0: plain
    offer: Offer | None = None  # drafted by the host; None: the drafter of the launch drafts
    price: float = 0.0  # probability of being right below which one more drafted token does not pay; 0: not known
    rule: Rule = Rule.COUPLED  # judges the draft; at temperature 0 lossless rules are the coupled one
    threshold: float = 0.0  # of rules that take one
    p_min: float | None = None  # the request's confidence below which a draft ends; None: the drafter's own limit
    tapped: bool = False  # the host wants the hidden states of the committed positions
    max_copy: int = 0  # tokens that a copy may have, at most, see `DraftingRound.copy_sure`; 0: nobody looks
    sure: int = 0  # tokens of a match from which a copy takes the place of the draft; 0: never

    @property
    def longest(self) -> int:
        """Tokens of its longest draft, whoever makes it."""
        return max(self.max_draft, self.max_copy)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed tokens [start, start + count) of a lane that a pass reads."""

    lane: int
    start: int
    count: int
    draws: bool  # the last committed token is among them: draw and append the next one
    target: bool = True  # the target reads them
    drafts: bool = False  # the drafter of the launch reads them; without the target, a head reads all held states
    scored: int = 0  # first rows whose next token, which is known, is scored
    top: int = 0  # alternatives to report for each scored token
    states: int = 0  # last rows whose hidden states after the last norm are wanted
    tapped: bool = False  # the host wants the hidden states of all rows at the target's taps
    mask: np.ndarray | None = None  # tokens that may be drawn, see `MaskSheet`; None: all


class Match(NamedTuple):
    """The longest match of a sequence's last tokens in its own text, before a round."""

    size: int  # tokens; 0: there is none
    end: int  # position of the token after it
    drafted: bool  # the network had drafted
    copied: bool  # the draft is a copy of what follows the match


class Landed(NamedTuple):
    """The outcome of a seat, or of a chunk of which more than keys and values is wanted.

    A chunk that does not draw has no tokens, and so has a seat without masks."""

    path: tuple[int, ...]  # drafted tokens that were accepted, by index
    drafted: tuple[int, ...]
    tokens: tuple[int, ...]  # new tokens: the accepted drafted ones, then the target's own
    parents: tuple[int, ...] = ()  # index of the parent of each drafted token, see Draft; empty: a chain
    scores: tuple[Logprob, ...] = ()  # log-probabilities of the new tokens, if the sequence asks for them
    prompt_scores: tuple[Logprob, ...] = ()  # log-probabilities of the tokens after a chunk's `scored` rows
    states: Tensor | None = None  # [rows, hidden] of a chunk's last `states` rows, on the host
    features: Tensor | None = None  # float32 [committed rows, taps * hidden] of a tapped seat or chunk, on the host
    match: Match | None = None  # what a lookup beside a network has found; None: it has not looked

    @property
    def accepted(self) -> int:
        return len(self.path)

    def cut(self, count: int) -> Landed:
        """Return the outcome of a seat as if the target's own token had been the new one before token `count`."""
        features = None if self.features is None else self.features[:count]
        return self._replace(path=self.path[: max(count - 1, 0)], tokens=self.tokens[:count], features=features)


class Times(NamedTuple):
    """Seconds that the device took; 0.0 where unknown."""

    step: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    read: float = 0.0  # of chunks
    typical: bool = True  # False: launched one by one where others are replayed, or recorded just before


class Rounds(Protocol):
    """Steps on a device. One thread calls in order; only `wait`, `collect` and `drafts` wait for the device."""

    drafters: Mapping[str, DeviceDrafter]  # those that the device can run, by name
    readers: Collection[str]  # names of the drafters with KV memory of their own, which must read all committed tokens
    tapping: Collection[str]  # names of the drafters that read the target's hidden states
    max_draft: int  # tokens of a seat's draft, at most
    timed: bool  # `round_seconds` is known once rounds have run
    synthetic_acceptance: float  # above 0: accept drafted tokens at random, for measurements; set before any launch
    judge: Any  # a `runner.rounds.rules.Judge` for drafts of seats with a rule of their own; set before any launch

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        """Write a sequence to a lane, or rewrite one that the host has changed: tokens int32 [length], sampling, and
        the tokens that its request predicts.

        The lane has no pages until they are set."""

    def cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        """Cut a lane to these tokens, int32 [length]: it has them and others behind them, or will have them when all
        launched steps have run. Its pages stay.

        `unread`: by drafter, how many of the hidden states held before the last token are to be read. For drafters that
        are not there they are useless, until a step has held some again."""

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        """Set entries `first`, first + 1, … of the lane's page table."""

    def launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        *,
        drafter: str | None,
        context: int,
        masked: Sequence[int] = (),
    ) -> Ticket:
        """Read the chunks, in order, then run a round over the seats.

        `drafter` reads the chunks with `drafts`, and drafts in the round. No sequence of the step can get longer than
        `context`. If the drafter is a reader, it has read all committed tokens of each drafting seat except the last
        two, which its first pass reads. If it has taps, the step holds the hidden states of the committed positions.
        `masked`: seats whose tokens are drawn with masks, which `draw` brings; by index, in order.

        A sequence that ended while a step is in flight may grow beyond the context, by at most `max_draft` + 1 tokens.
        Lanes have room for them, and the outcome is dropped."""

    def drafts(self, ticket: Ticket) -> Mapping[int, Sequence[Branch]]:
        """Wait for the drafts of a step with masked seats. Return, by index of each masked seat, the branches of its
        draft; without a draft it has one branch of one row."""

    def sheet(self, ticket: Ticket) -> MaskSheet:
        """Return an empty sheet for the masks of a step's rows, once every step before has been collected. Rows that
        branches of a tree share may be on it several times."""

    def draw(self, ticket: Ticket, drawing: Collection[int]) -> None:
        """Draw and accept in a step with masked seats; no step may be launched between its launch and this.

        `drawing`: the masked seats whose masks are on the step's sheet, by index; the others draw nothing, and their
        lanes stay as they are. Masks decide alone which stop tokens may be drawn, whatever `min_tokens` says. A row
        without one may draw any token; its draft is never accepted."""

    def wait(self, ticket: Ticket) -> None:
        """Wait for a step, so that the time of the device can be told from that of the host."""

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        """Wait for a step, and read its outcome. Each step is collected once, in the order of launches.

        Returns outcomes of chunks (None if only keys and values were wanted), outcomes of seats, and times."""

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        """Estimate seconds of a round of `batch` seats, each with `draft` tokens of this drafter; None: not known.

        With `draft` 0 it is a plain round, and the drafter does not matter. Drafters on the host have the times of
        rounds with offers."""

    def improve(self) -> bool:
        """Use a moment in which nothing is in flight to make later steps faster. False: nothing is left to do."""


class DraftingRound(Protocol):
    """The part of a round that a drafter on the device works on: one seat for each decoding sequence.

    Where rounds are captured as CUDA graphs, `draft` runs once for each shape of a round and its launches are replayed
    later. So it may only launch work: shapes depend on `longest` and on the number of seats, never on values that live
    on the device, and nothing waits for the device. A seat may be a dummy that fills the batch up."""

    state: DeviceState  # tokens, lengths, pages and sampling parameters of every lane
    longest: int  # tokens of the longest draft that a seat may have; 0: only copies are made

    @property
    def lanes(self) -> Tensor:
        """The lane of each seat, int32 [seats]."""

    @property
    def found(self) -> Tensor:
        """Number of tokens drafted for each seat, int32 [seats]: written by a drafter that `finds_fewer`."""

    def limits(self) -> Tensor:
        """Compute how many tokens may be drafted for each seat, int32 [seats]."""

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        """Run `model` over the last `rows` (1 or 2) tokens of each seat, after `turn` tokens have been drafted.

        Returns the logits [seats, vocab] after the last one, with no columns beyond the target's vocabulary. Rows of
        seats that may not have more than `turn` tokens are arbitrary."""

    def masked(self, model: Forward, mask: int) -> Callable[[int], Tensor]:
        """Run a PARD `model` once: over the last `longest` + 1 tokens of each seat, which it may not have read, and
        over as many masks behind them as further tokens can be drafted.

        Returns a function of `turn` = 0, 1, …: it gives the logits of the token behind `turn` drafted ones, as `logits`
        does."""

    def guess(self, head: Head, turn: int) -> Tensor:
        """Run an EAGLE-3 head, after `turn` tokens have been drafted: first over all held states of each seat, then
        over its own output.

        Returns the logits [seats, draft vocabulary] after the last row of each seat; arbitrary ones for seats that may
        not have more than `turn` tokens, or for which no states are held."""

    def block(self, head: ReadingHead) -> Callable[[int], Tensor]:
        """Run a block drafter: it reads all held states of each seat, then computes one block after its last token.

        Returns a function of `turn`, called once for each of 0, 1, … in order, after as many tokens have been appended:
        it gives the logits [seats, draft vocabulary] of the next one; arbitrary ones as `guess` does."""

    def last_states(self) -> Tensor:
        """Return the hidden state of the last position before the last committed token, [seats, width]."""

    def append(self, logits: Tensor, turn: int, *, ids: Tensor | None = None, doubting: bool = False) -> None:
        """Draw a token from logits [seats, vocab], with the target's noise, and put it behind `turn` drafted ones.

        Penalties, bias and masks of the seats are applied to the logits first, in place. `ids` int32 [vocab]: the
        target's token of each column, if these are not its vocabulary. `doubting`: a draft
        whose confidence is below the seat's threshold gets no more tokens, and `found` is written; a drafter that calls
        `guess` or `last_states` passes it, because seats without held states get no draft."""

    def plant(self, *, width: int, levels: int) -> None:
        """Begin a tree for each seat: `width` nodes are read in a pass, and each has as many children.

        `guess` then runs the head over the nodes of the last level, and returns logits [seats · width, …]. Its rows use
        slots behind the committed text: levels - 1 passes of `width` rows must be at most `longest` + 1."""

    def branch(self, logits: Tensor, level: int, *, ids: Tensor | None = None, fitted: bool = True) -> None:
        """Add the best tokens of logits, drawn with the target's noise, as the nodes of a level: see
        `kernels.growth_reference`.

        `fitted`: logits are those of an EAGLE-3 head after each node, and confidence is as fitted for it. Otherwise
        they are of one row for each seat, the same after all nodes, and confidence is their probability."""

    def prune(self) -> None:
        """Make the most likely nodes of each tree its draft, and write `found`."""

    def look_up(self, *, min_ngram: int, max_ngram: int, predicted: bool = False) -> None:
        """Draft the continuation of the longest n-gram match of each seat, and write `found`.

        `predicted`: look in the request's prediction, too; only for a drafter that `reads_prediction`."""

    def copy_sure(self, *, min_ngram: int, max_ngram: int, stays: bool = False) -> None:
        """Let a copy take the place of a seat's draft, in `found` as well, where the last `Seat.sure` tokens stand in
        its text already. `found` has been written before; matches are reported, used or not.

        `stays`: copies come first, and tokens that `append` draws afterwards do not replace them."""


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that runs inside rounds on the device, without the host.

    Drafted tokens go behind the committed ones of each seat's lane: `state.tokens[lane, lengths[lane] + i]`. It may
    also have the attributes of `Drafter` that say what the engine may ask for, and `threshold`:

    - `taps`: places of the target whose hidden states it reads, see `DraftingRound.guess` and `last_states`;
    - `head`: a head with KV memory of its own, which reads these states of every committed position;
    - `max_draft`: tokens of its longest draft;
    - `max_copy`: tokens of its longest copy, see `DraftingRound.copy_sure`; such a drafter `finds_fewer`, and drafts in
      rounds without passes of its network, too;
    - `network`: name of the drafter whose KV memory and hidden states it uses;
    - `ends_drafts`: True if it ends drafts itself, by `Seat.price`;
    - `reads_prediction`: True if it reads the requests' predictions, `state.predicted`;
    - `threshold(seat)`: confidence below which the draft of a seat ends, see `DraftingRound.append`;
    - `levels(count)`: levels of a draft of at most `count` tokens;
    - `sized(seats, most)`: the drafter of rounds with so many seats and drafts of at most `most` tokens, see
      `traits.drafter_of`; `tree`, `max_draft`, `levels`, `threshold` and `draft` are then those of this one;
    - `tree`: True if it drafts trees, always of as many tokens as it can. It then writes the parent of each token to
      `state.parents[lane, i]`, parents before children (see Draft). The round moves keys and values of the accepted
      path into place for the target alone: a `reader` that drafts trees must read that path again before it drafts."""

    @property
    def reader(self) -> Forward | None:
        """The model with KV memory of its own, which must read every committed token; None: nothing is read."""

    @property
    def finds_fewer(self) -> bool:
        """True: drafts may be shorter than asked for, and `draft` writes `DraftingRound.found`."""

    def draft(self, round: DraftingRound) -> None:
        """Draft for all seats of a round, at most `limits` tokens each."""


NOTHING = Landed((), (), ())  # the outcome of a chunk that draws nothing


def write_offer(row: np.ndarray, offer: Offer, *, most: int) -> None:
    """Write an offer to a row of the table of `offer_reference.offer`, for a draft of at most `most` tokens.

    Offered tokens for which the row has no room are left out."""
    count = min(len(offer.tokens), len(row) - HEADER)
    row[: HEADER + count] = most, offer.start, count, offer.near, *offer.tokens[:count]


def tell_matches(landed: list[Landed], seats: Sequence[Seat], reports: Sequence[int]) -> None:
    """Add to the outcomes of seats what `lookup_reference.copy_sure` reports of them."""
    for index, (seat, report) in enumerate(zip(seats, reports, strict=False)):
        outcome = landed[index]
        if seat.max_copy and seat.offer is None and outcome.tokens:
            size, end = (report & ~DRAFTED) >> SIZE_SHIFT, report & ((1 << SIZE_SHIFT) - 1)
            copied = 0 < seat.sure <= size and bool(outcome.drafted)
            landed[index] = outcome._replace(match=Match(size, end, report & DRAFTED > 0, copied))


def read_all(rows: Sequence[Sequence[int]], *, tree: bool = False) -> list[Landed]:
    """Read what `accept` or `tree_accept` writes for all seats."""
    return [read_landed(row, tree=tree) if row[1] else Landed((), (), (row[2],)) for row in rows]


def read_landed(row: Sequence[int], *, tree: bool = False) -> Landed:
    """Read what `accept` writes for a seat, or `tree_accept` for a tree.

    accepted │ drafted │ new tokens [k + 1] │ drafted tokens [k] │ new length │ path [k] │ parents [k], if a tree"""
    accepted, drafted = row[0], row[1]
    longest = len(row) // 4 - 1 if tree else len(row) // 2 - 2
    old, new = tuple(row[3 + longest : 3 + longest + drafted]), tuple(row[2 : 3 + accepted])
    if not tree:
        return Landed(_chain(accepted), old, new)
    end = 4 + 2 * longest
    path, parents = row[end : end + accepted], row[end + longest : end + longest + drafted]
    return Landed(path=tuple(path), drafted=old, tokens=new, parents=tuple(parents))


@cache
def _chain(accepted: int) -> tuple[int, ...]:
    """Return the path of an accepted chain."""
    return tuple(range(accepted))
