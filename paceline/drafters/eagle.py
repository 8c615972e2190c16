"""An EAGLE-3 head that drafts: one small layer over the target's own hidden states, one pass a token.

It is fed the hidden states of every position that the target commits, and keeps its keys and values under the target's
page ids. Row i of the head belongs to position i, needs the token at i + 1, and guesses the one at i + 2:

    committed   0 ............................ L-2  L-1 │
    computed    0 ............................ L-2      │       the target reads the last token while it verifies
    the head    0 ...... known │ held ........ L-2      │       first pass: the held rows; the last gives token L
    draft                                           │ L-1  L …  further passes, on the head's own output

Rows of a draft are overwritten with true ones once the target has judged them. Positions that came from the prefix
cache have no hidden states; their pages still hold the head's keys and values, or `knows` says that they do not, and
the target computes them again. A sequence that it has not been fed all rows of gets empty drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Seen
from paceline.drafters.drawing import Drawing, belief
from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE, Output
from paceline.kv.pages import PagePool
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads import HeadForward, Wanted
from paceline.runner.lanes import Lanes
from paceline.sampling import Pick, Stream, noise_keys

HOLD = 32  # rows kept for the next draft; more are read at once


@dataclass(slots=True)
class _State:
    lane: int
    known: int  # positions whose keys and values the head has
    held: Tensor  # [HOLD, width] hidden states of the positions that follow
    count: int = 0  # of them
    filled: int = 0  # whole pages entered in `_filled`

    @property
    def end(self) -> int:
        """The position that is to be fed next."""
        return self.known + self.count

    def share(self, count: int, *, outs: int = 1) -> Share:
        """The next `count` rows."""
        return Share(lane=self.lane, start=self.known, count=count, outs=outs)


class EagleDrafter:
    prompt = True

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
        max_draft: int = 8,
        min_confidence: float = 0.3,
    ) -> None:
        """`width`: of the features, all taps together. `pick`: the target's. A draft ends early once the head believes
        in all of it with less than `min_confidence`, or what the request says instead."""
        if max_draft < 1 or not 0 <= min_confidence <= 1:
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        self.name = name
        self.taps = taps
        self.max_draft = max_draft
        self._min_confidence = min_confidence
        self._head = head
        self._chain: Callable[..., list[list[int]]] | None = getattr(head, "chain", None)
        self._ids = head.ids.tolist()
        self._width = width
        self._lanes = lanes
        self._pool = pool
        self._vocab_size = vocab_size
        self._pick = pick
        self._states: dict[int, _State] = {}
        self._filled = [-1] * pool.num_pages  # the epoch in which the whole page was last read with hidden states

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        known = 0
        for page in self._lanes.pages_np[lane, : (len(tokens) - 1) // PAGE_SIZE].tolist():
            if page < 0 or not self.knows(page):
                break
            known += 1
        held = torch.empty((HOLD, self._width), device=self._head.device)
        self._states[key] = _State(lane=lane, known=known * PAGE_SIZE, held=held, filled=known)

    def knows(self, page: int) -> bool:
        return self._filled[page] == self._pool.epochs[page]

    def stop(self, key: int) -> None:
        del self._states[key]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        pass  # what counts is what it is fed

    # ── reading ──

    def feed(self, seen: Sequence[Seen]) -> None:
        long: list[tuple[_State, Tensor]] = []
        for each in seen:
            state = self._states[each.key]
            if state.end < each.start:
                continue  # something got lost on the way: nothing more is drafted for it
            features = each.features if state.end == each.start else each.features[state.end - each.start :]
            if state.count + len(features) <= HOLD:
                self._hold(state, features)
            else:
                long.append((state, features))
        self._read(long)

    def _hold(self, state: _State, features: Tensor) -> None:
        state.held[state.count : state.count + len(features)] = features
        state.count += len(features)

    def _read(self, parts: Sequence[tuple[_State, Tensor]]) -> None:
        """Compute what is held and what follows it, all but the last row, whose guess is wanted later."""
        if not parts:
            return
        shares, features = [], []
        for state, rows in parts:
            shares.append(state.share(state.count + len(rows) - 1, outs=0))
            features += [state.held[: state.count], rows[:-1]]
        self._compute(shares, torch.cat([rows.to(self._head.device) for rows in features]))
        for state, rows in parts:
            state.known += state.count + len(rows) - 1
            state.count = 0
            self._hold(state, rows[-1:])
            self._note_filled(state)

    def _compute(self, shares: Sequence[Share], features: Tensor) -> Output:
        return self._head(build_batch(self._lanes, shares, ahead=1), features=features)

    def _note_filled(self, state: _State) -> None:
        whole = state.known // PAGE_SIZE
        if whole > state.filled:
            for page in self._lanes.pages_np[state.lane, state.filled : whole].tolist():
                self._filled[page] = self._pool.epochs[page]
            state.filled = whole

    # ── drafting ──

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._states[ask.key].count and self._in_step(ask)]
        drafts: dict[int, Draft] = {}
        if ready:
            at_once = self._chain is not None and all(map(_is_simple, ready))
            drafts = self._draft_at_once(ready) if at_once else self._draft_by_steps(ready)
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    def _in_step(self, ask: Ask) -> bool:
        return self._states[ask.key].end == len(ask.tokens) - 1

    def _first_rows(self, asks: Sequence[Ask]) -> tuple[list[Share], Tensor]:
        """The held rows of each sequence, the last of them with logits. They are known from now on."""
        states = [self._states[ask.key] for ask in asks]
        shares = [state.share(state.count) for state in states]
        held = [state.held[: state.count] for state in states]
        for state in states:
            state.known, state.count = state.end, 0
            self._note_filled(state)
        return shares, held[0] if len(held) == 1 else torch.cat(held)

    def _floor(self, ask: Ask) -> float:
        return self._min_confidence if ask.p_min is None else ask.p_min

    def _draft_at_once(self, asks: Sequence[Ask]) -> dict[int, Draft]:
        assert self._chain is not None
        shares, features = self._first_rows(asks)
        wanted = [_wanted(ask, self._floor(ask)) for ask in asks]
        batch = build_batch(self._lanes, shares, ahead=1, beyond=max(each.limit for each in wanted))
        drafted = self._chain(batch, features, wanted)
        return {ask.key: Draft(tokens=tuple(tokens)) for ask, tokens in zip(asks, drafted, strict=True)}

    def _draft_by_steps(self, asks: Sequence[Ask]) -> dict[int, Draft]:
        shares, features = self._first_rows(asks)
        drawings = [Drawing(ask, floor=self._floor(ask)) for ask in asks]
        ends = np.cumsum([share.rows for share in shares]).tolist()
        going = [(drawing, end - 1) for drawing, end in zip(drawings, ends, strict=True)]  # and its row
        output = self._compute(shares, features)
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
            drawing.confidence *= belief(logits[0], place)

    def _spread(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary, where what the head cannot say is impossible."""
        whole = torch.full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._head.ids.long()] = logits
        return whole


def _is_simple(ask: Ask) -> bool:
    """Nothing is asked but the best token, or a temperature."""
    params = ask.sampler.params
    return not params.edits_logits and (ask.sampler.greedy or not (params.filters or ask.rule.wants_probs))


def _wanted(ask: Ask, floor: float) -> Wanted:
    sampler, first = ask.sampler, len(ask.tokens)
    if sampler.greedy:
        return Wanted(limit=ask.max_draft, least=floor)
    keys = noise_keys(sampler.seed, np.arange(first, first + ask.max_draft), Stream.TOKEN)
    return Wanted(limit=ask.max_draft, least=floor, inverse_temperature=1.0 / sampler.params.temperature, keys=keys)


def _next_row(drawing: Drawing) -> Share:
    """The row of the position before the token drawn last."""
    return Share(lane=drawing.ask.lane, start=drawing.position - 2, count=1)
