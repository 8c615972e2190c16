"""A Forward without arithmetic: the logits of a row are a hash of exactly the tokens it attends to.

It is instant, bitwise, and more sensitive than any real model: one wrong slot, page, position or ancestor changes the
whole distribution, and a context out of order is an error at once. Its "keys and values" are tokens and positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

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
PLACES = np.arange(4096)
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


@functools.cache
def tables(seed: int, vocab_size: int, sharpness: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits by the last token, and corrections by the whole context: models of the same kind share them."""
    contexts = sharpness * table(seed, CONTEXTS, vocab_size)
    contexts = contexts + noise * sharpness * table(seed + 1000, CONTEXTS, vocab_size)
    return contexts, 0.7 * table(seed + 2000, DETAILS, vocab_size)


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
        self._contexts, self._details = tables(seed, vocab_size, sharpness, noise)
        self._last: Output | None = None

    @torch.inference_mode()
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
        contexts = self._contexts_of(batch, batch.logit_rows.tolist(), owners.tolist())
        logits = torch.from_numpy(np.array([self.logits_after(context) for context in contexts], dtype=np.float32))
        logits = logits.view(len(owners), self.vocab_size)
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

    def _contexts_of(self, batch: Batch, rows: Sequence[int], owners: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the tokens that each row attends to, itself last."""
        positions, bases, pages = batch.positions.tolist(), batch.bases.tolist(), batch.page_table.numpy()
        tails = None if batch.tails is None else batch.tails.numpy()
        for row, owner in zip(rows, owners, strict=True):
            length = positions[row] + 1
            index = PLACES[: length if tails is None else min(length, bases[owner])]
            slots = pages[owner][index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
            if tails is not None:
                slots = np.concatenate((slots, tails[row, : length - len(index)]))
            assert np.array_equal(self._kv.positions[slots], PLACES[:length]), "a context out of order"
            yield self._kv.tokens[slots]

    def logits_after(self, context: np.ndarray) -> np.ndarray:
        """What the model thinks of the token after these."""
        recent = int(context[-1]) * 1_000_003
        whole = int(((context + 1).astype(np.uint64) * POWERS[: len(context)]).sum() >> np.uint64(32))
        return np.asarray(self._contexts[recent % CONTEXTS] + self._details[whole % DETAILS])
