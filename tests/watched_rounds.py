"""Rounds that check their callers, for engines whose steps run on a device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.kv.cache import KVCache
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, Landed, Seat, Ticket, Times
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet


@dataclass
class Late:
    """The ticket of a step that is perhaps not done yet."""

    step: Any = None  # ticket of the step, once it is launched
    todo: int = 0  # orders of the step that were not done


class WatchedRounds(PortableRounds):
    """Rounds that are as late as a device may be: nothing happens before its outcome is asked for. And they see to it
    that a step in flight can do no harm: its lanes are not rewritten, and none of the pages that it may write to is
    given to anybody else before it has landed."""

    cache: KVCache | None = None  # whose pages; set once it is there

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launches = 0
        self.most_in_flight = 0
        self.cuts = 0
        self.seats: list[Sequence[Seat]] = []
        self.masked: list[Sequence[int]] = []  # seats that draw with masks, by index
        self.chunks: list[Sequence[Chunk]] = []
        self._orders: deque[Callable[[], Any]] = deque()  # what was asked for and has not been done
        self._pages: dict[int, dict[int, int]] = {}  # by lane: its pages, and the epochs in which they were set
        self._in_flight: list[tuple[set[int], dict[int, int]]] = []  # lanes and pages of each step

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        assert not any(lane in lanes for lanes, _ in self._in_flight), "a lane is rewritten under a step in flight"
        self._pages[lane] = {}
        self._orders.append(functools.partial(super().write, lane, tokens, sampler, prediction))

    def cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        self.cuts += 1
        self._orders.append(functools.partial(self._cut, lane, tokens, sampler, unread))

    def _cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        assert self._state.tokens[lane, : len(tokens)].tolist() == tokens.tolist(), "a lane with other tokens is cut"
        assert self._state.lengths[lane] > len(tokens), "a lane without more tokens is cut"
        super().cut(lane, tokens, sampler, unread)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        assert self.cache is not None
        self._pages[lane] |= {page: self.cache.pool.epochs[page] for page in pages}
        self._orders.append(functools.partial(super().set_pages, lane, first, pages))

    def launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        *,
        drafter: str | None,
        context: int,
        masked: Sequence[int] = (),
    ) -> Ticket:
        lanes = {part.lane for part in (*chunks, *seats)}
        self._in_flight.append((lanes, {page: epoch for lane in lanes for page, epoch in self._pages[lane].items()}))
        self.launches += 1
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.seats.append(seats)
        self.masked.append(masked)
        self.chunks.append(chunks)
        ticket = Late()
        self._order(ticket, lambda: setattr(ticket, "step", self._launch(chunks, seats, drafter, context, masked)))
        return ticket

    def _launch(
        self, chunks: Sequence[Chunk], seats: Sequence[Seat], drafter: str | None, context: int, masked: Sequence[int]
    ) -> Ticket:
        self._changes.apply(self._upload)
        for seat in seats:
            assert self._state.lengths[seat.lane] + seat.longest + 1 <= context
        return super().launch(chunks, seats, drafter=drafter, context=context, masked=masked)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        assert self.cache is not None
        _, pages = self._in_flight.pop(0)
        taken = [page for page, epoch in pages.items() if self.cache.pool.epochs[page] != epoch]
        assert not taken, f"pages {taken} changed hands while a step in flight could write to them"
        return super().collect(self._step(ticket))

    def drafts(self, ticket: Ticket) -> Mapping[int, Sequence[Branch]]:
        return super().drafts(self._step(ticket))

    def sheet(self, ticket: Ticket) -> MaskSheet:
        return super().sheet(self._step(ticket))

    def draw(self, ticket: Ticket, drawing: Collection[int]) -> None:
        assert len(self._in_flight) == 1, "a step is drawn before the steps before it have landed"
        self._order(ticket, lambda: PortableRounds.draw(self, ticket.step, drawing))

    def _order(self, ticket: Late, order: Callable[[], Any]) -> None:
        ticket.todo += 1
        self._orders.append(lambda: (order(), setattr(ticket, "todo", ticket.todo - 1)))

    def _step(self, ticket: Late) -> Any:
        """Do what was asked for, in order, until all of a step is done."""
        while ticket.todo:
            self._orders.popleft()()
        return ticket.step
