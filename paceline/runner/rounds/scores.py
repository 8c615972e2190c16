"""Log-probabilities of a step on a device: launched after it for the sequences that ask, and read when it has landed.

Nothing here waits for the device: reports lie in the host's memory, and are valid once the step is done. The operations
are those of kernels/cuda/score.py, or of its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Landed
from paceline.runner.rounds.upload import Upload, download
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
        seats: Tensor,
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
    row_starts: Tensor  # int32 [seats, or one more] first row of each seat
    lanes: Tensor  # int32 [rows] lane of each row
    raw: Tensor | None = None  # float32 [rows, vocab] the raw logits of rows whose lane edits them; None: no lane does
    tree: bool = False  # the outcomes are reports of `tree_accept`


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
    tops: Mapping[int, int]  # index of each seat that asks → alternatives that it asks for; in the order of the report
    steps: int  # rows of the report for each seat

    def attach(self, landed: list[Landed]) -> None:
        """Add the scores to the outcomes of all seats."""
        for place, (seat, top) in enumerate(self.tops.items()):
            scores = self.report.read(place * self.steps, landed[seat].tokens, top)
            landed[seat] = landed[seat]._replace(scores=scores)


class Scorer:
    """Launches scores. Knows which lanes ask for log-probabilities of new tokens."""

    def __init__(self, state: DeviceState, upload: Upload, operations: ScoreOperations, *, pdl: bool = False) -> None:
        self._state = state
        self._upload = upload
        self._operations = operations
        self._pdl = pdl
        self._tops: dict[int, int] = {}  # lane → alternatives

    def write(self, lane: int, sampler: Sampler) -> None:
        """Begin a sequence in a lane."""
        self._tops.pop(lane, None)
        if sampler.params.logprobs is not None:
            self._tops[lane] = sampler.params.logprobs

    def score_seats(self, lanes: Sequence[int], verified: Verified) -> SeatScores | None:
        """Score the new tokens of the seats in `lanes` that ask; None: none does."""
        if self._tops.keys().isdisjoint(lanes):
            return None
        tops = {seat: self._tops[lane] for seat, lane in enumerate(lanes) if lane in self._tops}
        steps, device = verified.outcomes.shape[1] // (4 if verified.tree else 2), self._state.device
        steps -= not verified.tree  # 1 + the longest draft
        rows, tokens = torch.empty((2, len(tops), steps), dtype=torch.int32, device=device)
        self._operations.score_pairs(
            verified.outcomes,
            seats=self._upload.ints([*tops]),
            row_starts=verified.row_starts,
            rows=rows,
            tokens=tokens,
            tree=verified.tree,
            pdl=self._pdl,
        )
        edited = (
            {} if verified.raw is None else {"raw": verified.raw, "edits": self._state.edits, "lanes": verified.lanes}
        )
        out = self._score(verified.logits, rows.view(-1), tokens.view(-1), max(tops.values()), **edited)
        return SeatScores(Report(download(out)), tops, steps)

    def score_rows(self, logits: Tensor, tokens: Tensor, top: int) -> Tensor:
        """Score `tokens` int32 [rows], one for each row of raw logits [rows, vocab]; return their report."""
        rows = torch.arange(len(tokens), dtype=torch.int32, device=logits.device)
        return self._score(logits, rows, tokens, top)

    def _score(self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, **edited: Tensor) -> Tensor:
        top = min(top, logits.shape[1])
        out = torch.empty((len(rows), 2 + 2 * top), dtype=torch.int32, device=logits.device)
        self._operations.score(logits, rows=rows, tokens=tokens, out=out, **edited, pdl=self._pdl)
        return out
