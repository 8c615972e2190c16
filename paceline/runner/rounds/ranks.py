"""Rounds of a model that is split over GPUs: rank 0 leads, and every other rank repeats its calls.

All ranks hold the same state of all sequences: they draft, draw and accept by the same launches over equal bits, and
meet in the sums of the target's passes alone. So nothing that a round decides is sent. What only rank 0 knows travels
as one message a step, just before rank 0 launches it: changes of lanes, chunks, seats, offers, masks, and which
recorded round runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import NoAnswer
from paceline.kernels.cuda.exchange import LOST, Peers
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda import CudaRounds
from paceline.runner.rounds.cuda_ticket import Ticket
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Seat, Times
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet

Repeated = tuple[str, tuple[Any, ...]]
"""The name of a method of `FollowingRounds`, and its arguments."""


class LeadingRounds:
    """Implements Rounds on rank 0."""

    def __init__(self, rounds: CudaRounds, peers: Peers, ranks: Ranks, key: int) -> None:
        """`key`: names the other ranks' `FollowingRounds`."""
        self._rounds, self._peers, self._ranks, self._key = rounds, peers, ranks, key
        self.drafters: Mapping[str, DeviceDrafter] = rounds.drafters
        self.readers: Collection[str] = rounds.readers
        self.tapping: Collection[str] = rounds.tapping
        self.max_draft, self.timed = rounds.max_draft, rounds.timed
        self._unsent: list[Repeated] = []
        self._ended = False  # a rank has ended, as the system says
        self._checked_at = time.monotonic()
        ranks.watch(self._give_up)

    @property
    def synthetic_acceptance(self) -> float:
        return self._rounds.synthetic_acceptance

    @synthetic_acceptance.setter
    def synthetic_acceptance(self, share: float) -> None:
        self._rounds.synthetic_acceptance = share

    @property
    def judge(self) -> Any:
        return self._rounds.judge

    @judge.setter
    def judge(self, judge: Any) -> None:
        self._rounds.judge = judge

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        self._unsent.append(("write", (lane, tokens.copy(), sampler.bare(), tuple(prediction))))
        self._rounds.write(lane, tokens, sampler, prediction)

    def cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        self._unsent.append(("cut", (lane, tokens.copy(), sampler.bare(), dict(unread))))
        self._rounds.cut(lane, tokens, sampler, unread)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._unsent.append(("set_pages", (lane, first, tuple(pages))))
        self._rounds.set_pages(lane, first, pages)

    @torch.inference_mode()
    def launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        *,
        drafter: str | None,
        context: int,
        masked: Sequence[int] = (),
    ) -> Ticket:
        chosen = self._rounds.choose(seats, drafter, context, masked) if seats else None
        bucket = None if chosen is None else chosen[0]
        arguments = (tuple(chunks), tuple(seats), drafter, context, tuple(masked), bucket)

        def mine() -> Ticket:
            return self._rounds.launch(chunks, seats, drafter=drafter, context=context, masked=masked, chosen=chosen)

        ticket: Ticket = self._everywhere(("launch", arguments), mine)
        return ticket

    def drafts(self, ticket: Ticket) -> Mapping[int, Sequence[Branch]]:
        drafts = self._rounds.drafts(ticket)
        self._check()
        return drafts

    def sheet(self, ticket: Ticket) -> MaskSheet:
        return self._rounds.sheet(ticket)

    def draw(self, ticket: Ticket, drawing: Collection[int]) -> None:
        assert ticket.sheet is not None, "masks are drawn with on the sheet of their step"
        self._unsent.append(("draw", (*ticket.sheet.taken(), tuple(drawing))))
        self._rounds.draw(ticket, drawing)

    def wait(self, ticket: Ticket) -> None:
        self._rounds.wait(ticket)

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        outcome = self._rounds.collect(ticket)
        self._check()
        self._unsent.append(("collect", ()))
        return outcome

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return self._rounds.round_seconds(batch, draft, drafter)

    def improve(self) -> bool:
        bucket = self._rounds.missing()
        if bucket is not None:
            self._everywhere(("record", (bucket,)), lambda: self._rounds.record(bucket))
        return bucket is not None

    def _everywhere(self, call: Repeated, mine: Callable[[], Any]) -> Any:
        """Send a call, and those before it, and make it on this rank."""
        calls, self._unsent = [*self._unsent, call], []
        return self._ranks.call(self._key, "repeat", (calls,), lambda calls: mine())

    def _give_up(self) -> None:
        """Let the device wait for nobody any more, from a thread of its own: no kernel is needed, for which a device
        that waits may have no room."""
        self._ended = True
        status = self._peers.status
        with torch.cuda.stream(torch.cuda.Stream(status.device)):  # type: ignore[no-untyped-call]  # torch's
            status[LOST : LOST + 1].copy_(torch.ones(1, dtype=torch.int32).pin_memory(), non_blocking=True)
            torch.cuda.current_stream(status.device).synchronize()

    def _check(self) -> None:
        """Raise RankLost if a rank did not come to a sum. The step that it missed took as long as it was waited for."""
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._ended or self._checked_at - before > self._peers.seconds / 2:
            self._ranks.guarded(self._raise_if_lost)

    def _raise_if_lost(self) -> None:
        if self._ended or int(self._peers.status[LOST]):
            raise NoAnswer("a rank does not come to a sum", silent=not self._ended)


class FollowingRounds:
    """The rounds of another rank, which repeat what rank 0 does."""

    def __init__(self, rounds: CudaRounds) -> None:
        self._rounds = rounds
        self._tickets: deque[Ticket] = deque()  # launched and not collected

    @torch.inference_mode()
    def repeat(self, calls: Sequence[Repeated]) -> None:
        for name, arguments in calls:
            getattr(self, f"_{name}")(*arguments)

    def _write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int]) -> None:
        self._rounds.write(lane, tokens, sampler, prediction)

    def _cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Mapping[str, int]) -> None:
        self._rounds.cut(lane, tokens, sampler, unread)

    def _set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        self._rounds.set_pages(lane, first, pages)

    def _launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        drafter: str | None,
        context: int,
        masked: Sequence[int],
        bucket: Bucket | None,
    ) -> None:
        chosen = None if bucket is None else self._rounds.chosen(bucket)
        ticket = self._rounds.launch(chunks, seats, drafter=drafter, context=context, masked=masked, chosen=chosen)
        self._tickets.append(ticket)

    def _draw(self, rows: Sequence[int], masks: np.ndarray, drawing: Collection[int]) -> None:
        self._rounds.sheet(self._tickets[-1]).put(rows, masks)
        self._rounds.draw(self._tickets[-1], drawing)

    def _collect(self) -> None:
        self._rounds.collect(self._tickets.popleft())

    def _record(self, bucket: Bucket) -> None:
        self._rounds.record(bucket)
