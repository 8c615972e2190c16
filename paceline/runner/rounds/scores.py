"""Log-probabilities of a step on a device: computed for the sequences that ask, and read when it has landed.

Nothing here waits for the device: reports lie in the host's memory, and are valid once the step is done. The operations
are those of kernels/cuda/score.py, or of its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Landed
from paceline.runner.rounds.upload import download
from paceline.sampling.sampler import Sampler
from paceline.types import Logprob


class ScoreOperations(Protocol):
    """The operations of kernels/score_reference.py."""

    def score(
        self,
        logits: Tensor,
        *,
        rows: Tensor,
        tokens: Tensor,
        out: Tensor,
        raw: Tensor | None = ...,
        edits: Tensor | None = ...,
        lanes: Tensor | None = ...,
        pdl: bool = ...,
    ) -> None: ...

    def score_pairs(
        self,
        outcomes: Tensor,
        *,
        lanes: Tensor,
        scored: Tensor,
        row_starts: Tensor,
        rows: Tensor,
        tokens: Tensor,
        tree: bool = ...,
        pdl: bool = ...,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Verified:
    """The memory of a verification that scores are computed from, on the device."""

    logits: Tensor  # float32 [rows, vocab]; rows of lanes that edit logits are edited
    outcomes: Tensor  # int32 [seats, …] reports of `accept`
    seats: Tensor  # int32 [seats] lane of each seat
    row_starts: Tensor  # int32 [seats, or one more] first row of each seat
    lanes: Tensor  # int32 [rows] lane of each row
    raw: Tensor | None = None  # float32 [rows, vocab] the raw logits of rows whose lane edits them; None: no lane does
    tree: bool = False  # the outcomes are reports of `tree_accept`

    @property
    def steps(self) -> int:
        """New tokens of a seat, at most: 1 + the longest draft."""
        numbers = self.outcomes.shape[1]
        return numbers // 4 if self.tree else numbers // 2 - 1


def score_new(
    operations: ScoreOperations, verified: Verified, state: DeviceState, pairs: Pairs, out: Tensor, *, pdl: bool = False
) -> None:
    """Score the new tokens of all seats whose lanes ask, into the report `out` int32 [seats · steps, 2 + 2 * top]."""
    operations.score_pairs(
        verified.outcomes,
        lanes=verified.seats,
        scored=state.scored,
        row_starts=verified.row_starts,
        rows=pairs.rows,
        tokens=pairs.tokens,
        tree=verified.tree,
        pdl=pdl,
    )
    edited = {} if verified.raw is None else {"raw": verified.raw, "edits": state.edits, "lanes": verified.lanes}
    operations.score(
        verified.logits, rows=pairs.rows.view(-1), tokens=pairs.tokens.view(-1), out=out, **edited, pdl=pdl
    )


class Pairs(NamedTuple):
    """Memory for the rows and new tokens of all seats: each int32 [seats, steps]."""

    rows: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, seats: int, steps: int, device: torch.device) -> Pairs:
        return cls(*(torch.empty((seats, steps), dtype=torch.int32, device=device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class Report:
    """Scores of tokens: see kernels/score_reference.py."""

    memory: Tensor  # int32 [tokens, 2 + 2 * top], on the host

    def read(self, first: int, tokens: Sequence[int], top: int) -> tuple[Logprob, ...]:
        """Read the scores of `tokens` from row `first` on, with at most `top` alternatives."""
        numbers = self.memory[first : first + len(tokens)].numpy()
        values, most = numbers.view(np.float32), numbers.shape[1] // 2 - 1
        ids, scores = numbers[:, 2 : 2 + most][:, :top].tolist(), values[:, 2 + most :][:, :top].tolist()
        return tuple(
            Logprob(
                token=token, logprob=float(values[i, 0]), rank=int(numbers[i, 1]), top=tuple(zip(*best, strict=True))
            )
            for i, (token, *best) in enumerate(zip(tokens, ids, scores, strict=True))
        )


@dataclass(frozen=True, slots=True)
class SeatScores:
    """Scores of the new tokens of some seats."""

    report: Report
    tops: Mapping[int, int]  # index of each seat that asks → alternatives that it asks for
    steps: int  # rows of the report for each seat

    def attach(self, landed: list[Landed]) -> None:
        """Add the scores to the outcomes of all seats."""
        for seat, top in self.tops.items():
            scores = self.report.read(seat * self.steps, landed[seat].tokens, top)
            landed[seat] = landed[seat]._replace(scores=scores)


class Scorer:
    """Launches scores. Knows which lanes ask for log-probabilities of new tokens."""

    def __init__(self, state: DeviceState, operations: ScoreOperations, *, pdl: bool = False) -> None:
        self._state = state
        self._operations = operations
        self._pdl = pdl
        self._tops: dict[int, int] = {}  # lane → alternatives

    def write(self, lane: int, sampler: Sampler) -> None:
        """Begin a sequence in a lane."""
        self._tops.pop(lane, None)
        if sampler.params.logprobs is not None:
            self._tops[lane] = sampler.params.logprobs

    def top(self, lanes: Sequence[int]) -> int | None:
        """Return the most alternatives that a lane asks for; None: none asks for log-probabilities."""
        return max((self._tops[lane] for lane in lanes if lane in self._tops), default=None) if self._tops else None

    def score_seats(self, lanes: Sequence[int], verified: Verified) -> SeatScores | None:
        """Score the new tokens of the seats in `lanes` that ask; None: none does."""
        top, device = self.top(lanes), self._state.device
        if top is None:
            return None
        pairs = Pairs.empty(len(lanes), verified.steps, device)
        out = _report_memory(pairs.rows.numel(), min(top, verified.logits.shape[1]), device)
        score_new(self._operations, verified, self._state, pairs, out, pdl=self._pdl)
        return self.read(lanes, download(out), steps=verified.steps)

    def read(self, lanes: Sequence[int], report: Tensor, *, steps: int) -> SeatScores:
        """Find the scores of seats in a report on the host, which has `steps` rows for each of them."""
        tops = {seat: self._tops[lane] for seat, lane in enumerate(lanes) if lane in self._tops}
        return SeatScores(Report(report), tops, steps)

    def score_rows(self, logits: Tensor, tokens: Tensor, top: int) -> Tensor:
        """Score `tokens` int32 [rows], one for each row of raw logits [rows, vocab]; return their report."""
        rows = torch.arange(len(tokens), dtype=torch.int32, device=logits.device)
        out = _report_memory(len(rows), min(top, logits.shape[1]), logits.device)
        self._operations.score(logits, rows=rows, tokens=tokens, out=out, pdl=self._pdl)
        return out


def _report_memory(tokens: int, top: int, device: torch.device) -> Tensor:
    return torch.empty((tokens, 2 + 2 * top), dtype=torch.int32, device=device)
