"""Exchanges as batches of equal length: long ones with long ones, so that little is padding.

    ids      [sequences, length]   prompt, answer, padding
    starts   [sequences]           where the answer begins
    ends     [sequences]           where the padding begins

An epoch's batches are a function of (seed, epoch) alone: whoever resumes at batch n of it gets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.output.storage import same_seed

STEP = 16  # lengths are multiples of it: matrices of attention stay aligned
POOL = 48  # batches whose sequences are sorted by length together


@dataclass(frozen=True, slots=True)
class Texts:
    ids: Tensor  # int64 [sequences, length]
    starts: Tensor  # int64 [sequences]
    ends: Tensor  # int64 [sequences]

    def to(self, device: torch.device) -> Texts:
        if device.type == "cpu":
            return self
        up = [part.pin_memory().to(device, non_blocking=True) for part in (self.ids, self.starts, self.ends)]
        return Texts(*up)

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.ends.sum())


def epoch_batches(exchanges: Sequence[Exchange], *, tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the exchanges of each batch, in the order of the epoch."""
    random = same_seed(seed, epoch)
    lengths = np.array([len(exchange.tokens) for exchange in exchanges])
    order = torch.randperm(len(exchanges), generator=random).numpy()
    pool = max(1, POOL * tokens // max(1, int(lengths.mean())))
    batches: list[list[int]] = []
    for first in range(0, len(order), pool):
        some = order[first : first + pool]
        batches += list(_cut(some[np.argsort(lengths[some], kind="stable")], lengths, tokens))
    return [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]


def in_order(exchanges: Sequence[Exchange], *, tokens: int) -> Iterator[Texts]:
    """All exchanges, the shortest first."""
    lengths = np.array([len(exchange.tokens) for exchange in exchanges])
    for batch in _cut(np.argsort(lengths, kind="stable"), lengths, tokens):
        yield pad([exchanges[index] for index in batch])


def pad(exchanges: Sequence[Exchange]) -> Texts:
    length = -(-max(len(exchange.tokens) for exchange in exchanges) // STEP) * STEP
    ids = np.zeros((len(exchanges), length), dtype=np.int64)
    for row, exchange in zip(ids, exchanges, strict=True):
        row[: len(exchange.tokens)] = exchange.tokens
    starts, ends = [exchange.prompt for exchange in exchanges], [len(exchange.tokens) for exchange in exchanges]
    return Texts(ids=torch.from_numpy(ids), starts=torch.tensor(starts), ends=torch.tensor(ends))


def _cut(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[list[int]]:
    """`order` is by length: batches of as many as have `tokens` together with their padding."""
    batch: list[int] = []
    for index in order.tolist():
        length = -(-int(lengths[index]) // STEP) * STEP
        if batch and (len(batch) + 1) * length > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
