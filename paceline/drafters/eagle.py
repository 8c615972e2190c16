"""An EAGLE-3 head that drafts: one small layer over the target's own hidden states, one pass a token.

It is fed the hidden states of every position that the target commits, and keeps its keys and values under the target's
page ids. Row i of the head belongs to position i, needs the token at i + 1, and guesses the one at i + 2:

    committed   0 ............................ L-2  L-1 │
    computed    0 ............................ L-2      │       the target reads the last token while it verifies
    the head    0 ...... known │ held ........ L-2      │       first pass: the held rows; the last gives token L
    draft                                           │ L-1  L …  further passes, on the head's own output: a level of the
                                                                tree each, one token of a chain

Nothing is computed before a draft is wanted: until then states are only held (`drafters.held`), so that a sequence
that does not draft costs a copy. What has piled up is read in chunks when it drafts. Where the memory for states ends
they are read at once, or, where too many sequences run for anybody to draft, the sequence is given up.

Rows of a draft are overwritten with true ones once the target has judged them. Positions that came from the prefix
cache have no hidden states; their pages still hold the head's keys and values, or their states are still held, or
`knows` says that they are not, and the target computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Seen
from paceline.drafters.drawing import Drawing, belief, chain_acceptance
from paceline.drafters.held import HeldStates
from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.abi import WIDTH_MAX
from paceline.kv.pages import PageMarks, PagePool
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads import HeadForward, Tree, Wanted
from paceline.runner.lanes import Lanes
from paceline.sampling import Pick

NEXT_ACCEPTANCE = 0.5  # usual probability that the next token of a chain is accepted, where the chain is in doubt
NET = 0.25  # what a level brings by tokens that the ones before it are likely to have, less what their rows cost
MANY = 1 << 30  # as good as all of a vocabulary
HOLD = 32  # rows that the first pass of a draft may have; of more, those before the last are read in chunks
WORTH = 96  # rows that are read for each token that one sequence alone may still draft
MEMORY = 256 << 20  # bytes of hidden states


@dataclass(slots=True)
class _State:
    lane: int
    known: int  # positions whose keys and values the head has
    end: int  # the position that is to be fed next; states from `known` on are held
    filled: int  # whole pages marked in `_filled`
    place: int = 0  # of the last page's states

    @property
    def count(self) -> int:
        return self.end - self.known

    def share(self, count: int, *, outs: int = 1) -> Share:
        """The next `count` rows."""
        return Share(lane=self.lane, start=self.known, count=count, outs=outs)


class EagleDrafter:
    prompt = True
    ends_drafts = True

    def __init__(
        self,
        head: HeadForward,
        *,
        taps: Sequence[int],
        width: int,
        name: str,
        lanes: Lanes,
        pool: PagePool,
        vocab_size: int,
        pick: Pick,
        chunk: int = 256,
        memory: int = MEMORY,
        max_draft: int = 7,
        branches: int = 4,
        min_confidence: float | None = None,
    ) -> None:
        """`width`: of the features, all taps together. `pick`: the target's. `chunk`: rows that it reads at once.
        `memory`: bytes for hidden states, if that is enough for a step. `branches`: tokens that may follow one, where
        the head drafts in one call; with the host in between a draft is a chain. What the head believes in with less
        than `min_confidence` is left out; by default what does not pay, or what the request says."""
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        if not 1 <= branches <= WIDTH_MAX:
            raise InvalidRequest(f"branches {branches} must be 1, for chains, to {WIDTH_MAX}")
        self.name = name
        self.taps = taps
        self.max_draft = max_draft
        self._min_confidence = min_confidence
        self._branches = branches
        self._head = head
        self._draft: Callable[..., list[Tree]] | None = getattr(head, "draft", None)
        self._ids = head.ids.tolist()
        self._lanes = lanes
        self._pool = pool
        self._vocab_size = vocab_size
        self._pick = pick
        self._chunk = chunk
        rows = max(memory // (4 * width), chunk + PAGE_SIZE * len(lanes.lengths))
        self._held = HeldStates(pool, rows=rows, width=width, device=head.device)
        self._states: dict[int, _State] = {}
        self._filled = PageMarks(pool)  # pages that were read as a whole

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        pages = self._lanes.pages_of(lane, 0, (len(tokens) - 1) // PAGE_SIZE)
        known = self._filled.leading(pages)
        held = self._held.leading(pages[known:])
        self._held.refresh(pages[known : known + held])
        self._states[key] = _State(lane, known=known * PAGE_SIZE, end=(known + held) * PAGE_SIZE, filled=known)

    def knows(self, page: int) -> bool:
        """Where there is hardly room for more states, to compute them again would be of no use."""
        return page in self._filled or page in self._held or self._held.is_short

    def stop(self, key: int) -> None:
        del self._states[key]
        self._held.expect_room()

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        pass  # what counts is what it is fed

    # ── reading ──

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, str]:
        if not crowded and not self._held.has_room(sum(2 + len(each.rows) // PAGE_SIZE for each in seen)):
            self._read([self._states[each.key] for each in seen])
        rows: list[int] = []
        places: list[int] = []
        lost: dict[int, str] = {}
        for each in seen:
            state = self._states[each.key]
            if (
                state.end == each.start and len(each.rows) == 1 and 0 < state.end % PAGE_SIZE < PAGE_SIZE - 1
            ):  # as usual
                rows += each.rows
                places.append(state.place + state.end % PAGE_SIZE)
                state.end += 1
            elif (reason := self._find_places(state, each, rows, places)) is not None:
                lost[each.key] = reason
                self._give_up(state)
        if rows:
            self._held.write(features, rows, places)
        return lost

    def _find_places(self, state: _State, seen: Seen, rows: list[int], places: list[int]) -> str | None:
        """Add what is new in `seen` to `rows`, and to `places` where it goes; or say why it cannot be held."""
        if state.end < seen.start:
            return f"drafter {self.name} has not seen the beginning: there was no room for its hidden states"
        before, end = len(rows), seen.start + len(seen.rows)
        while state.end < end:
            offset, page = state.end % PAGE_SIZE, int(self._lanes.pages_np[state.lane, state.end // PAGE_SIZE])
            place = state.place if offset else self._held.place(page)
            if place is None:
                del rows[before:], places[before:]
                return f"no room for more than {len(self._held.memory)} hidden states for drafter {self.name}"
            count = min(PAGE_SIZE - offset, end - state.end)
            rows += seen.rows[state.end - seen.start : state.end - seen.start + count]
            places += range(place + offset, place + offset + count)
            state.place, state.end = place, state.end + count
            if offset + count == PAGE_SIZE:
                self._held.complete(page)
        return None

    def _give_up(self, state: _State) -> None:
        """Let go of what nobody else can use."""
        pages = self._lanes.pages_of(state.lane, state.filled, -(-state.end // PAGE_SIZE))
        self._held.drop([page for page in pages if self._pool.holders(page) == 1])
        state.known = state.end = -1

    def _read(self, states: Sequence[_State]) -> None:
        """Compute all that is held but the last row of each, whose guess is wanted later."""
        while self._read_chunk(states):
            pass

    def _read_chunk(self, states: Sequence[_State]) -> bool:
        room = self._chunk
        shares, places, read = [], [], []
        for state in states:
            self._skip_pages(state)
            count = min(state.count - 1, room)
            if count > 0:
                shares.append(state.share(count, outs=0))
                places += self._places(state, count)
                read.append((state, count))
                room -= count
        if shares:
            self._head(build_batch(self._lanes, shares, ahead=1), features=self._held.read(places))
        for state, count in read:
            self._advance(state, count)
        return bool(shares)

    def _skip_pages(self, state: _State) -> None:
        """Those that were read for another sequence in the meantime."""
        pages = self._lanes.pages_of(state.lane, state.known // PAGE_SIZE, state.end // PAGE_SIZE)
        if skipped := self._filled.leading(pages):
            state.filled = state.known // PAGE_SIZE + skipped
            state.known = state.filled * PAGE_SIZE

    def _places(self, state: _State, count: int) -> list[int]:
        """Of the next `count` rows."""
        first, end = state.known // PAGE_SIZE, state.known + count
        pages = self._lanes.pages_of(state.lane, first, -(-end // PAGE_SIZE))
        return self._held.rows_of(pages, state.known - first * PAGE_SIZE, end - first * PAGE_SIZE)

    def _advance(self, state: _State, count: int) -> None:
        """The next `count` rows have been read, or will have been before anything else is."""
        state.known += count
        whole = state.known // PAGE_SIZE
        if whole > state.filled:
            pages = self._lanes.pages_of(state.lane, state.filled, whole)
            self._filled.add(pages)
            self._held.drop(pages)
            state.filled = whole

    # ── drafting ──

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        in_step = [ask for ask in asks if self._states[ask.key].end == len(ask.tokens) - 1]
        self._catch_up(in_step)
        ready = [ask for ask in in_step if 0 < self._states[ask.key].count <= HOLD]
        drafts: dict[int, Draft] = {}
        if ready:
            at_once = self._draft is not None and all(map(_is_simple, ready))
            drafts = self._draft_at_once(ready) if at_once else self._draft_by_steps(ready)
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    def _catch_up(self, asks: Sequence[Ask]) -> None:
        """Read a chunk of what has piled up. Who has more goes without a draft for once; who will soon be at its end
        goes without for good, where it matters what that costs: the more sequences run, the less a draft saves."""
        piled = []
        for ask in asks:
            state = self._states[ask.key]
            self._skip_pages(state)
            pays = not ask.price or state.count <= WORTH * ask.left // len(asks) ** 2
            if state.count > HOLD and pays:
                piled.append(state)
        self._read_chunk(piled)

    def _first_rows(self, asks: Sequence[Ask]) -> tuple[list[Share], Tensor]:
        """The held rows of each sequence, the last of them with logits. They are known from now on."""
        states = [self._states[ask.key] for ask in asks]
        shares = [state.share(state.count) for state in states]
        held = self._held.read([place for state in states for place in self._places(state, state.count)])
        for state in states:
            self._advance(state, state.count)
        return shares, held

    def _floor(self, ask: Ask) -> float:
        """Of the belief in a whole draft, at which it ends: the request's own, the user's, or what the next token must
        be worth."""
        own = self._own_floor(ask)
        return ask.price / NEXT_ACCEPTANCE if own is None else own

    def _own_floor(self, ask: Ask) -> float | None:
        return self._min_confidence if ask.p_min is None else ask.p_min

    def _floors(self, ask: Ask) -> tuple[float, float]:
        """The same of a tree: of the belief in a token, and in all tokens of a level for there to be another one."""
        own = self._own_floor(ask)
        return (ask.row_price, (ask.price - ask.row_price) / NET) if own is None else (own, own)

    def _draft_at_once(self, asks: Sequence[Ask]) -> dict[int, Draft]:
        assert self._draft is not None
        shares, features = self._first_rows(asks)
        for share, ask in zip(shares, asks, strict=True):
            share.seed, share.warmth = ask.sampler.seed, ask.sampler.warmth
        wanted = [_wanted(ask, *self._floors(ask)) for ask in asks]
        batch = build_batch(self._lanes, shares, ahead=1, beyond=max(each.limit for each in wanted))
        trees = self._draft(batch, features, wanted, width=self._branches)
        return {
            ask.key: Draft(tuple(tokens), _branching(parents))
            for ask, (tokens, parents) in zip(asks, trees, strict=True)
        }

    def _draft_by_steps(self, asks: Sequence[Ask]) -> dict[int, Draft]:
        shares, features = self._first_rows(asks)
        drawings = [Drawing(ask, floor=self._floor(ask)) for ask in asks]
        ends = np.cumsum([share.rows for share in shares]).tolist()
        going = [(drawing, end - 1) for drawing, end in zip(drawings, ends, strict=True)]  # and its row
        output = self._head(build_batch(self._lanes, shares, ahead=1), features=features)
        while True:
            for i, (drawing, _) in enumerate(going):
                self._draw(drawing, output.logits[i : i + 1], int(output.argmax[i]))
            going = [(drawing, row) for drawing, row in going if not drawing.over]
            if not going:
                return {drawing.ask.key: drawing.finished() for drawing in drawings}
            batch = build_batch(self._lanes, [_next_row(drawing) for drawing, _ in going], ahead=1)
            output = self._head(batch, carry=[row for _, row in going])
            going = [(drawing, row) for row, (drawing, _) in enumerate(going)]

    def _draw(self, drawing: Drawing, logits: Tensor, best: int) -> None:
        """One more token, into the draft and behind the committed tokens of its lane; logits [1, draft vocabulary]."""
        sampler, position = drawing.ask.sampler, np.array([drawing.position])
        if drawing.free:
            logits = self._spread(logits)
            token = place = drawing.draw_freely(logits, self._pick)
        elif sampler.params.edits_logits:
            logits = sampler.edit(self._spread(logits), [drawing.tokens])
            token = place = int(sampler.draw(logits, position, self._pick)[0])
        else:
            place = best if sampler.greedy else int(sampler.draw(logits, position, self._head.pick)[0])
            token = self._ids[place]
        self._lanes.tokens_np[drawing.ask.lane, drawing.position] = token
        drawing.tokens.append(token)
        if drawing.floor and not drawing.complete:
            drawing.confidence *= chain_acceptance(belief(logits[0], place), drawn=not sampler.greedy)

    def _spread(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary, where what the head cannot say is impossible."""
        whole = torch.full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._head.ids.long()] = logits
        return whole


def _is_simple(ask: Ask) -> bool:
    """Nothing is asked but the best token, or a temperature and filters."""
    return not ask.sampler.params.edits_logits and (ask.sampler.greedy or not ask.rule.wants_probs)


def _wanted(ask: Ask, worth: float, least: float) -> Wanted:
    params = ask.sampler.params
    if ask.sampler.greedy or not params.filters:
        return Wanted(ask.max_draft, worth, least)
    return Wanted(ask.max_draft, worth, least, params.min_p, params.top_p, min(params.top_k, MANY))


def _branching(parents: list[int]) -> tuple[int, ...]:
    """Nothing where the tree is a chain."""
    return () if parents == [*range(-1, len(parents) - 1)] else tuple(parents)


def _next_row(drawing: Drawing) -> Share:
    """The row of the position before the token drawn last."""
    return Share(lane=drawing.ask.lane, start=drawing.position - 2, count=1)
