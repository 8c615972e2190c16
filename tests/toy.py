"""A Forward without arithmetic: the logits of a row are a hash of exactly the tokens it attends to.

It is instant, bitwise, and more sensitive than any real model: one wrong slot, page, position or ancestor changes the
whole distribution, and a context out of order is an error at once. Its "keys and values" are tokens and positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pick import pick

CONTEXTS = 4099  # distinct distributions by the last token
HIDDEN = 64
STATE = 77  # tap whose states stand for those after the last norm
DETAILS = 509  # distinct corrections by the whole context
POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, dtype=np.uint64))


class ToyKV:
    """The token and the position in each slot."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.tokens = np.full(num_pages * PAGE_SIZE, -1, dtype=np.int64)
        self.positions = np.full(num_pages * PAGE_SIZE, -1, dtype=np.int64)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for memory in (self.tokens, self.positions):
            memory[list(target)] = memory[list(source)]

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        both = (torch.from_numpy(memory[slots.numpy()]).float() for memory in (self.tokens, self.positions))
        keys, values = (each.view(1, -1, 1, 1) for each in both)
        return keys, values


@functools.cache
def table(seed: int, rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab_size)).astype(np.float32)


class ToyForward:
    """`noise` adds another table of the same kind: a drafter that is right less often the larger it is."""

    bitwise = True

    def __init__(
        self,
        *,
        num_pages: int,
        seed: int = 0,
        noise: float = 0.0,
        vocab_size: int = 97,
        sharpness: float = 3.0,
        taps: Sequence[int] = (),
    ) -> None:
        self.taps = taps
        self._kv = ToyKV(num_pages)
        self.kv: KVMemory = self._kv
        self.vocab_size = vocab_size
        self._contexts = sharpness * table(seed, CONTEXTS, vocab_size)
        self._contexts = self._contexts + noise * sharpness * table(seed + 1000, CONTEXTS, vocab_size)
        self._details = 0.7 * table(seed + 2000, DETAILS, vocab_size)
        self._last: Output | None = None

    def __call__(self, batch: Batch) -> Output:
        if self._last is not None:  # the memory of an Output belongs to the next pass
            self._last.logits.fill_(torch.nan)
            self._last.argmax.fill_(-1)
            for kept in (self._last.features, self._last.states):
                if kept is not None:
                    kept.fill_(torch.nan)
        assert int(batch.tokens.max()) < self.vocab_size, "a token outside of the vocabulary"
        slots = batch.slots.numpy()
        self._kv.tokens[slots] = batch.tokens.numpy()
        self._kv.positions[slots] = batch.positions.numpy()
        owners = np.searchsorted(batch.row_starts.numpy(), batch.logit_rows.numpy(), side="right") - 1
        rows = zip(batch.logit_rows.tolist(), owners.tolist(), strict=True)
        logits = torch.empty((len(owners), self.vocab_size))
        for out, (row, owner) in enumerate(rows):
            logits[out] = torch.from_numpy(self.logits_after(self._context(batch, row, owner)))
        wanted = batch.features and self.taps
        features = self.features_of(batch.tokens.numpy(), batch.positions.numpy()) if wanted else None
        places = batch.tokens.numpy(), batch.positions.numpy()
        states = self.features_of(*places, taps=(STATE,)) if batch.states else None
        self._last = Output(logits=logits, argmax=logits.argmax(-1).int(), features=features, states=states)
        return self._last

    def features_of(self, tokens: np.ndarray, positions: np.ndarray, taps: Sequence[int] | None = None) -> Tensor:
        """Hidden states [rows, taps * HIDDEN]: they tell token, position and tap."""
        wanted = self.taps if taps is None else taps
        states = [table(7, CONTEXTS, HIDDEN)[(tokens * 31 + positions * 1009 + tap) % CONTEXTS] for tap in wanted]
        return torch.from_numpy(np.concatenate(states, axis=1))

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.from_numpy(table(8, self.vocab_size, HIDDEN)[tokens.numpy()])

    def project(self, states: Tensor) -> Tensor:
        return states @ torch.from_numpy(table(9, self.vocab_size, HIDDEN)).T

    def pick(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        return pick(load_library(), 1, logits, scales, keys)

    def _context(self, batch: Batch, row: int, owner: int) -> np.ndarray:
        """The tokens that a row attends to, itself last."""
        position, base = int(batch.positions[row]), int(batch.bases[owner])
        shared = position + 1 if batch.tails is None else min(position + 1, base)
        index = np.arange(shared)
        slots = batch.page_table[owner].numpy()[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
        if batch.tails is not None:
            slots = np.concatenate((slots, batch.tails[row, : position + 1 - shared].numpy()))
        assert np.array_equal(self._kv.positions[slots], np.arange(position + 1)), "a context out of order"
        return self._kv.tokens[slots]

    def logits_after(self, context: np.ndarray) -> np.ndarray:
        """What the model thinks of the token after these."""
        recent = int(context[-1]) * 1_000_003
        whole = int(((context + 1).astype(np.uint64) * POWERS[: len(context)]).sum() >> np.uint64(32))
        return np.asarray(self._contexts[recent % CONTEXTS] + self._details[whole % DETAILS])
