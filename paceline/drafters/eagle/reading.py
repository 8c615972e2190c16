"""Reading of an EAGLE-3 head: store the target's hidden states, and run the head over them when a draft is wanted.

Row i of the head belongs to position i, needs the token at i + 1, and guesses the one at i + 2:

    committed   0 ............................ L-2  L-1 │
    computed    0 ............................ L-2      │       the target reads the last token while it verifies
    the head    0 ...... known-1 │ held ...... end-1    │       end = L - 1 where nothing is missing

Held rows are those whose hidden states are stored (`drafters.eagle.hidden_states`) and not read yet. Nothing is
computed before a draft is wanted, so that a sequence that does not draft costs only a copy. Held rows are read in
chunks when the sequence drafts. If the memory for states is full, they are read at once. If too many sequences run for
any to draft, the sequence is dropped instead: it is fed no more states, and does not draft again unless it restarts.

Rows of a draft are overwritten with true ones once the target has judged them. Positions that came from the prefix
cache have no hidden states. Either their pages still have the head's keys and values, or their states are still held,
or `knows` returns False and the target computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from paceline.drafters.base import Ask, Seen
from paceline.drafters.eagle.hidden_states import HiddenStateStore
from paceline.kernels.base import PAGE_SIZE
from paceline.kv.following import Follower, Reader
from paceline.kv.pages import PagePool
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.protocol import StateReader
from paceline.runner.lanes import Lanes
from paceline.types import Off, OffKind

MAX_FIRST_ROWS = 32  # rows that the first pass of a draft may have; more are read in chunks before it
# Held rows that are worth reading per token that the answer may still get, for a single sequence. With n sequences it
# is divided by n², because drafts save less in a larger batch. Measured as 32 at 63 µs per row (docs/experiments.md,
# "Reading held states when the load falls"); since then a row costs a third of that ("What a head reads of a prompt").
MAX_ROWS_PER_TOKEN = 96


@dataclass(slots=True)
class _State:
    """One sequence: positions below `follower.known` are read, those from there to `end` are held."""

    lane: int
    follower: Follower
    end: int  # next position to be fed; -1: dropped, it is fed no more
    place: int = 0  # first row of the last page's states in the store

    @property
    def held(self) -> int:
        """Rows that were fed and not read yet."""
        return self.end - self.follower.known

    def share(self, count: int, *, outs: int = 1) -> Share:
        """Return the next `count` rows to read, as a share of a batch."""
        return Share(lane=self.lane, start=self.follower.known, count=count, outs=outs)


class HeadReading:
    """How far a head has read each sequence, and the hidden states that it has yet to read."""

    def __init__(
        self, head: StateReader, *, name: str, lanes: Lanes, pool: PagePool, width: int, chunk: int, state_bytes: int
    ) -> None:
        """`name`: the drafter's, for messages. `width`: columns of the features, all taps together. `chunk`: rows of a
        reading pass. `state_bytes`: memory for hidden states; more is used if a step needs it."""
        rows = max(state_bytes // (4 * width), chunk + PAGE_SIZE * len(lanes.lengths))
        self._store = HiddenStateStore(pool, rows=rows, width=width, device=head.device)
        self._head = head
        self._name = name
        self._lanes = lanes
        self._pool = pool
        self._chunk = chunk
        self._states: dict[int, _State] = {}
        self._reader = Reader(pool)

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        """Begin after the leading pages that were read, or are held, for another sequence."""
        follower = self._reader.start(partial(self._lanes.pages_of, lane), len(tokens) - 1)
        pages = self._lanes.pages_of(lane, follower.known // PAGE_SIZE, (len(tokens) - 1) // PAGE_SIZE)
        held = self._store.leading(pages)
        self._store.refresh(pages[:held])
        self._states[key] = _State(lane, follower, end=follower.known + held * PAGE_SIZE)

    def stop(self, key: int) -> None:
        del self._states[key]
        self._store.expect_room()

    def knows(self, page: int) -> bool:
        """Tell whether a page needs no hidden states. True for every page while memory for states is short."""
        return page in self._reader or page in self._store or self._store.is_short

    # ── feeding ──

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        """Hold the hidden states of a step; see FeatureDrafter."""
        if not crowded and not self._store.has_room(sum([2 + len(each.rows) // PAGE_SIZE for each in seen])):
            self._read_all([self._states[each.key] for each in seen])
        rows: list[int] = []
        places: list[int] = []
        lost: dict[int, Off] = {}
        for each in seen:
            state, count = self._states[each.key], len(each.rows)
            offset = state.end % PAGE_SIZE
            if state.end == each.start and 0 < offset < PAGE_SIZE - count:
                rows += each.rows  # the usual case: a few tokens, inside of a page
                places += range(state.place + offset, state.place + offset + count)
                state.end += count
            elif (reason := self._find_places(state, each, rows, places)) is not None:
                lost[each.key] = reason
                self._drop(state)
        if rows:
            self._store.write(features, rows, places)
        return lost

    def _find_places(self, state: _State, seen: Seen, rows: list[int], places: list[int]) -> Off | None:
        """Add the new rows of `seen` to `rows`, and their places in the store to `places`; or return why it cannot."""
        if state.end < seen.start:
            detail = f"drafter {self._name} has not seen the beginning: there was no room for its hidden states"
            return Off(OffKind.NO_HIDDEN_STATES, detail)
        before, end = len(rows), seen.start + len(seen.rows)
        while state.end < end:
            offset, page = state.end % PAGE_SIZE, int(self._lanes.pages_np[state.lane, state.end // PAGE_SIZE])
            place = state.place if offset else self._store.place(page)
            if place is None:
                del rows[before:], places[before:]
                detail = f"no room for more than {len(self._store.memory)} hidden states for drafter {self._name}"
                return Off(OffKind.NO_HIDDEN_STATES, detail)
            count = min(PAGE_SIZE - offset, end - state.end)
            rows += seen.rows[state.end - seen.start : state.end - seen.start + count]
            places += range(place + offset, place + offset + count)
            state.place, state.end = place, state.end + count
            if offset + count == PAGE_SIZE:
                self._store.complete(page)
        return None

    def _drop(self, state: _State) -> None:
        """Free held states that no other sequence can use. This sequence is fed no more states."""
        pages = self._lanes.pages_of(state.lane, state.follower.known // PAGE_SIZE, -(-state.end // PAGE_SIZE))
        self._store.drop([page for page in pages if self._pool.holders(page) == 1])
        state.end = -1

    # ── reading ──

    def catch_up(self, asks: Sequence[Ask]) -> list[Ask]:
        """Read one chunk of the held rows, and return the asks that can draft now.

        A sequence that still has more than MAX_FIRST_ROWS gets no draft in this step. If drafts have a price, rows are
        not read for a sequence too near to its end for drafts to pay for it (MAX_ROWS_PER_TOKEN)."""
        current = [ask for ask in asks if self._states[ask.key].end == len(ask.tokens) - 1]
        behind = []
        for ask in current:
            state = self._states[ask.key]
            state.follower.skip(state.end)
            pays = not ask.price or state.held <= MAX_ROWS_PER_TOKEN * ask.left // len(current) ** 2
            if state.held > MAX_FIRST_ROWS and pays:
                behind.append(state)
        self._read_chunk(behind)
        return [ask for ask in current if 0 < self._states[ask.key].held <= MAX_FIRST_ROWS]

    def take_held(self, asks: Sequence[Ask]) -> tuple[list[Share], Tensor]:
        """Return the held rows of each sequence, the last of them with logits, and their hidden states.

        They count as read from now on: the caller runs the head over them next."""
        states = [self._states[ask.key] for ask in asks]
        shares = [state.share(state.held) for state in states]
        features = self._store.read([place for state in states for place in self._places(state, state.held)])
        for state in states:
            self._advance(state, state.held)
        return shares, features

    def _read_all(self, states: Sequence[_State]) -> None:
        """Read all held rows but the last of each sequence, whose logits are needed for its draft."""
        while self._read_chunk(states):
            pass

    def _read_chunk(self, states: Sequence[_State]) -> bool:
        """Read one chunk of the held rows, without the last of each sequence; return False if no row was left."""
        room = self._chunk
        shares, places, read = [], [], []
        for state in states:
            state.follower.skip(state.end)
            count = min(state.held - 1, room)
            if count > 0:
                shares.append(state.share(count, outs=0))
                places += self._places(state, count)
                read.append((state, count))
                room -= count
        if shares:
            self._head(build_batch(self._lanes, shares, ahead=1), features=self._store.read(places))
        for state, count in read:
            self._advance(state, count)
        return bool(shares)

    def _places(self, state: _State, count: int) -> list[int]:
        """Rows of the store that hold the next `count` rows of a sequence."""
        known = state.follower.known
        first, end = known // PAGE_SIZE, known + count
        pages = self._lanes.pages_of(state.lane, first, -(-end // PAGE_SIZE))
        return self._store.rows_of(pages, known - first * PAGE_SIZE, end - first * PAGE_SIZE)

    def _advance(self, state: _State, count: int) -> None:
        """Note that the next `count` rows are read, and drop the states of pages that became whole."""
        self._store.drop(state.follower.reach(state.follower.known + count))
