"""A step on a CUDA device between its launch and its end, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.runner.rounds.alignment import aligned
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda_chunks import ReadChunks
from paceline.runner.rounds.cuda_round import CudaRound
from paceline.runner.rounds.outcomes import Fetched
from paceline.runner.rounds.protocol import Chunk, Seat
from paceline.runner.rounds.round_states import RoundStates
from paceline.sampling.words import Branch, MaskSheet, branches


@dataclass(slots=True)
class Ticket:
    """Tensors are in the host's memory, and valid once the device has come so far."""

    chunks: Sequence[Chunk]
    seats: Sequence[Seat]
    bucket: Bucket | None
    round: CudaRound | None
    read: ReadChunks  # outcomes of chunks
    began: torch.cuda.Event | None
    typical: bool  # see Times
    all_read: torch.cuda.Event | None = None  # the chunks are read
    laid: Tensor | None = None  # first row of each seat, then the token of each row; if drafts wait for masks
    ancestors: Tensor | None = None  # drafted tokens before each row of a tree
    drafted: torch.cuda.Event | None = None  # `laid` and `ancestors` are there
    verified: torch.cuda.Event | None = None  # the device waits for masks
    masked: torch.cuda.Event | None = None  # the masks are there
    sheet: MaskSheet | None = None  # the masks
    masked_seats: Sequence[int] = ()
    void: Collection[int] = ()  # masked seats that draw nothing
    outcome: Fetched | None = None  # of the seats
    states: RoundStates | None = None  # hidden states for the host
    done: torch.cuda.Event | None = None
    ended: bool = False  # the host has waited for `done`

    @property
    def tree(self) -> bool:
        """True if drafts are trees."""
        return self.round is not None and self.round.tree

    def seconds(self) -> float:
        """Return how long the device worked, without waiting for masks; 0.0: not known."""
        if self.began is None or self.done is None:
            return 0.0
        whole = float(self.began.elapsed_time(self.done))
        if self.verified is not None and self.masked is not None:
            whole -= self.verified.elapsed_time(self.masked)
        return whole / 1e3

    def drafts(self) -> Mapping[int, Sequence[Branch]]:
        """Return the branches of the masked seats' drafts, once they are there."""
        if self.bucket is None or self.laid is None:  # a row for each seat
            return {index: _alone(index) for index in self.masked_seats}
        laid, rows = self.laid.tolist(), aligned(self.bucket.seats + 1)  # `laid` has the rows' tokens from there on
        spans = {index: (laid[index], laid[index + 1]) for index in self.masked_seats}
        if self.ancestors is None:
            return {
                index: [Branch(tuple(laid[rows + first + 1 : rows + stop]), range(first, stop))]
                for index, (first, stop) in spans.items()
            }
        before = self.ancestors.tolist()
        return {
            index: branches([tuple(token for token in row if token >= 0) for row in before[first:stop]], first)
            for index, (first, stop) in spans.items()
        }


@cache
def _alone(row: int) -> list[Branch]:
    """Return the branches of an empty draft."""
    return [Branch((), (row,))]
