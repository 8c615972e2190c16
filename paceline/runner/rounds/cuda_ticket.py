"""A step on a CUDA device between its launch and its end, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda_chunks import ReadChunks
from paceline.runner.rounds.cuda_round import CudaRound
from paceline.runner.rounds.outcomes import Fetched
from paceline.runner.rounds.protocol import Chunk, Path, Seat
from paceline.runner.rounds.round_states import RoundStates


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
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)  # by row
    void: Collection[int] = ()  # seats that draw nothing
    outcome: Fetched | None = None  # of the seats
    states: RoundStates | None = None  # hidden states for the host
    done: torch.cuda.Event | None = None

    @property
    def tree(self) -> bool:
        """True if drafts are trees."""
        return self.round is not None and self.round.tree

    @property
    def masked_seats(self) -> list[int]:
        return [index for index, seat in enumerate(self.seats) if seat.masked]

    def seconds(self) -> float:
        """Return how long the device worked, without waiting for masks; 0.0: not known."""
        if self.began is None or self.done is None:
            return 0.0
        whole = float(self.began.elapsed_time(self.done))
        if self.verified is not None and self.masked is not None:
            whole -= self.verified.elapsed_time(self.masked)
        return whole / 1e3

    def starts(self) -> Sequence[int]:
        """Return the first row of each seat, once the drafts are there."""
        count = len(self.seats) + 1
        return range(count) if self.laid is None else self.laid[:count].tolist()

    def paths(self) -> Mapping[int, Sequence[Path]]:
        """Return the drafted tokens before each row of the masked seats, once they are there."""
        if self.bucket is None or self.laid is None:
            return {index: [()] for index in self.masked_seats}
        starts, tokens = self.starts(), self.laid[self.bucket.seats + 1 :].tolist()
        spans = {index: (starts[index], starts[index + 1]) for index in self.masked_seats}
        if self.ancestors is None:
            return {
                index: [tuple(tokens[first + 1 : end]) for end in range(first + 1, stop + 1)]
                for index, (first, stop) in spans.items()
            }
        before = self.ancestors.tolist()
        return {
            index: [tuple(token for token in row if token >= 0) for row in before[first:stop]]
            for index, (first, stop) in spans.items()
        }
