"""Masks of a grammar as words of 32 tokens each, the lowest bit first; and the paths of tokens that they are for.

A mask has bits for the whole vocabulary and for some tokens more, which no text has: see `padded_size`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

ALIGNED_BITS = 128  # a mask is a multiple of these, so that each begins at an aligned address
UNWRITTEN = np.uint32(1 << 30)  # last word of a mask that nobody has written: the bit of the last token, which is empty

Path = tuple[int, ...]
"""Drafted tokens that follow each other."""


class Branch(NamedTuple):
    """A path from the root of a draft to a leaf, and the row of the verification behind each of its beginnings."""

    tokens: Path
    rows: Sequence[int]  # 1 + tokens


class MaskSheet:
    """The masks of some rows of a step, in memory that a device can reach: they are written where they are sent from.

    which   int32 [rows]            index of each row's mask; -1: any token may be drawn
    words   uint32 [masks, words]   a mask that is reserved and not written has the bit of an empty token
    """

    def __init__(self, which: np.ndarray, words: np.ndarray) -> None:
        self.which = which
        self.words = words
        self.mask_bytes: int = words.shape[1] * words.itemsize
        self.used = 0  # masks that are reserved
        self.address: int = words.__array_interface__["data"][0]  # of the first mask
        self._numbers = np.arange(len(words), dtype=np.int32)
        self._rows: list[int] = []  # the row of each mask
        self._lapped = 0.0  # CPU time of this thread, in seconds

    @classmethod
    def empty(cls, rows: int, masks: int, vocab_size: int) -> MaskSheet:
        sheet = cls(np.empty(rows, dtype=np.int32), np.empty((masks, mask_words(vocab_size)), dtype=np.uint32))
        sheet.clear()
        return sheet

    def clear(self) -> None:
        """Take all masks away."""
        self.which.fill(-1)
        self.used = 0
        self._rows = []
        self._lapped = time.thread_time()

    def lap(self) -> float:
        """Return the CPU seconds that this thread has worked since the last call, or since the sheet was empty."""
        since, self._lapped = self._lapped, time.thread_time()
        return self._lapped - since

    def take(self, rows: Sequence[int]) -> int:
        """Reserve adjacent masks for these rows, of which the first will be written. Return its index."""
        first = self.used
        self.used += len(rows)
        self._rows += rows
        if len(rows) > 1:
            self.words[first + 1 : self.used, -1] = UNWRITTEN
        return first

    def put(self, rows: Sequence[int], masks: Iterable[np.ndarray | None]) -> None:
        """Copy the masks of some rows; None: the row has none."""
        for index, mask in enumerate(masks, self.take(rows)):
            if mask is None:
                self.words[index, -1] = UNWRITTEN
            else:
                self.words[index, : len(mask)] = mask
                self.words[index, len(mask) :] = 0

    def taken(self) -> tuple[list[int], np.ndarray]:
        """Return the rows for which masks are reserved, and copies of these masks, as another sheet's `put` takes
        them."""
        return [*self._rows], self.words[: self.used].copy()

    def masks_of(self, rows: Iterable[int]) -> list[np.ndarray | None]:
        """Return the masks of rows; None: none was reserved, because the row is behind a token that does not fit."""
        masks = {row: mask for mask, row in enumerate(self._rows)}
        return [self.words[masks[row]] if row in masks else None for row in rows]

    def settle(self) -> None:
        """Enter the masks that were written for their rows."""
        unwritten, masks = self.words[: self.used, -1] & UNWRITTEN, self._numbers[: self.used]
        self.which[self._rows] = np.where(unwritten, -1, masks) if unwritten.any() else masks


def padded_size(vocab_size: int) -> int:
    """Return the number of tokens of a mask: those of the vocabulary, one that may stand for the end, and empty ones,
    which are never allowed. A mask has one bit more: llguidance makes room for it."""
    return -(-(vocab_size + 3) // ALIGNED_BITS) * ALIGNED_BITS - 1


def mask_words(vocab_size: int) -> int:
    return (padded_size(vocab_size) + 1) // 32


def pack(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Make the mask of some tokens: uint32 [words]."""
    bits = np.zeros(padded_size(vocab_size) + 1, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def has_token(mask: np.ndarray, token: int) -> bool:
    return bool(mask.item(token >> 5) >> (token & 31) & 1)


def branches(paths: Sequence[Path], first: int) -> list[Branch]:
    """Return the branches of a tree, of which `paths` lead to each row from row `first` on, parents before children."""
    rows = {path: first + i for i, path in enumerate(paths)}
    parents = {path[:-1] for path in paths if path}
    return [
        Branch(path, [rows[path[:count]] for count in range(len(path) + 1)]) for path in paths if path not in parents
    ]
