"""Masks of a grammar as words of 32 tokens each, uint32 [vocab / 32], the lowest bit first; and paths of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def pack(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Make the mask of some tokens: uint32 [vocab / 32]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def has_token(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def only_token(mask: np.ndarray) -> int | None:
    """Return the token of a mask with exactly one; None: it has none or several."""
    if np.count_nonzero(mask) != 1:
        return None
    place = int(np.flatnonzero(mask)[0])
    word = int(mask[place])
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1


def chains(paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """List the paths to the leaves of a tree, which has all of their beginnings as well."""
    if len(paths[-1]) == len(paths) - 1:
        return [paths[-1]]  # the tree is a chain
    parents = {path[:-1] for path in paths if path}
    return [path for path in paths if path not in parents]
