"""Padded batches of exchanges of similar length, so that little of a batch is padding.

    ids      [sequences, length]   prompt, answer, padding
    starts   [sequences]           first position of the answer
    ends     [sequences]           first position of the padding

The batches of an epoch are a function of (seed, epoch) alone: a training that resumes at batch n gets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.seeds import seeded_generator

LENGTH_MULTIPLE = 16  # tokens; padded lengths are multiples of it, which keeps the matrices of attention aligned
SORT_POOL_BATCHES = 48  # batches whose exchanges are sorted by length together


@dataclass(frozen=True, slots=True)
class TextBatch:
    ids: Tensor  # int64 [sequences, length]
    starts: Tensor  # int64 [sequences]
    ends: Tensor  # int64 [sequences]

    def to(self, device: torch.device) -> TextBatch:
        if device.type == "cpu":
            return self
        up = [part.pin_memory().to(device, non_blocking=True) for part in (self.ids, self.starts, self.ends)]
        return TextBatch(*up)


def epoch_batches(exchanges: Sequence[Exchange], *, tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the indices of the exchanges of each batch, in the order of the epoch. A batch has at most `tokens` tokens
    with its padding, or is a single exchange."""
    random = seeded_generator(seed, epoch)
    lengths = np.array([len(exchange.tokens) for exchange in exchanges])
    order = torch.randperm(len(exchanges), generator=random).numpy()
    pool = max(1, SORT_POOL_BATCHES * tokens // max(1, int(lengths.mean())))
    batches: list[list[int]] = []
    for first in range(0, len(order), pool):
        some = order[first : first + pool]
        batches += list(_cut(some[np.argsort(lengths[some], kind="stable")], lengths, tokens))
    return [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]


def in_order(exchanges: Sequence[Exchange], *, tokens: int) -> Iterator[TextBatch]:
    """Yield batches of all exchanges, shortest first."""
    lengths = np.array([len(exchange.tokens) for exchange in exchanges])
    for batch in _cut(np.argsort(lengths, kind="stable"), lengths, tokens):
        yield pad([exchanges[index] for index in batch])


def pad(exchanges: Sequence[Exchange]) -> TextBatch:
    """Put exchanges into one batch, padded at the end."""
    length = _padded(max(len(exchange.tokens) for exchange in exchanges))
    ids = np.zeros((len(exchanges), length), dtype=np.int64)
    for row, exchange in zip(ids, exchanges, strict=True):
        row[: len(exchange.tokens)] = exchange.tokens
    starts, ends = [exchange.prompt for exchange in exchanges], [len(exchange.tokens) for exchange in exchanges]
    return TextBatch(ids=torch.from_numpy(ids), starts=torch.tensor(starts), ends=torch.tensor(ends))


def _cut(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[list[int]]:
    """Cut `order`, which is sorted by length, into batches of at most `tokens` with their padding."""
    batch: list[int] = []
    for index in order.tolist():
        if batch and (len(batch) + 1) * _padded(int(lengths[index])) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
