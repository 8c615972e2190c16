"""Rounds that check their callers, for engines whose steps run on a device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.kv.cache import KVCache
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, Landed, Seat, Ticket, Times
from paceline.sampling.sampler import Sampler


class WatchedRounds(PortableRounds):
    """Rounds that are as late as a device may be: nothing happens before its outcome is asked for. And they see to it
    that a step in flight can do no harm: its lanes are not rewritten, and none of the pages that it may write to is
    given to anybody else before it has landed."""

    cache: KVCache | None = None  # whose pages; set once it is there

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launches = 0
        self.most_in_flight = 0
        self.seats: list[Sequence[Seat]] = []
        self.chunks: list[Sequence[Chunk]] = []
        self._orders: deque[Callable[[], Any]] = deque()  # what was asked for and has not been done
        self._pages: dict[int, dict[int, int]] = {}  # by lane: its pages, and the epochs in which they were set
        self._in_flight: list[tuple[set[int], dict[int, int]]] = []  # lanes and pages of each step

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        assert not any(lane in lanes for lanes, _ in self._in_flight), "a lane is rewritten under a step in flight"
        self._pages[lane] = {}
        self._orders.append(functools.partial(super().write, lane, tokens, sampler))

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        assert self.cache is not None
        self._pages[lane] |= {page: self.cache.pool.epochs[page] for page in pages}
        self._orders.append(functools.partial(super().set_pages, lane, first, pages))

    def set_mask(self, lane: int, bits: np.ndarray, *, sure: int = 0) -> None:
        self._orders.append(functools.partial(super().set_mask, lane, bits, sure=sure))

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        lanes = {part.lane for part in (*chunks, *seats)}
        self._in_flight.append((lanes, {page: epoch for lane in lanes for page, epoch in self._pages[lane].items()}))
        self.launches += 1
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.seats.append(seats)
        self.chunks.append(chunks)
        self._orders.append(functools.partial(self._launch, chunks, seats, drafter, context))
        return self._orders[-1]

    def _launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], drafter: str | None, context: int) -> Ticket:
        self._changes.apply(self._upload)
        for seat in seats:
            assert self._state.lengths[seat.lane] + seat.max_draft + 1 <= context
        return super().launch(chunks, seats, drafter=drafter, context=context)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        assert self.cache is not None
        _, pages = self._in_flight.pop(0)
        taken = [page for page, epoch in pages.items() if self.cache.pool.epochs[page] != epoch]
        assert not taken, f"pages {taken} changed hands while a step in flight could write to them"
        while (order := self._orders.popleft()) is not ticket:
            order()
        return super().collect(ticket())
