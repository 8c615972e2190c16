"""Suffix automata in C (suffix.c), and drafts from them (suffix_draft.c).

An automaton holds texts of token ids. It knows how often each token followed each context of up to SUFFIX_DEPTH tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int32, c_void_p
from typing import NamedTuple

import numpy as np

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.abi import SOURCES_MAX, SUFFIX_DEPTH, SUFFIX_NODES_MAX, Status, SuffixOrder
from paceline.kernels.cpu.build import Library

TOKEN_BYTES = ctypes.sizeof(c_int32)


class SuffixAutomaton:
    def __init__(self, library: Library) -> None:
        self._library = library
        self.address = library.paceline_suffix_new()
        if not self.address:
            raise OutOfMemory("no memory for a suffix automaton")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.paceline_suffix_free(self.address)

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, int32, to the text."""
        assert tokens.dtype == np.int32, f"tokens of {tokens.dtype}"
        if self._library.paceline_suffix_extend(self.address, tokens.tobytes(), len(tokens)) != Status.FINE:
            raise OutOfMemory(f"no memory for {len(tokens)} more tokens of a suffix automaton")

    def end_text(self) -> None:
        """End the text: the next token begins another one."""
        self._library.paceline_suffix_end(self.address)

    @property
    def bytes(self) -> int:
        """Bytes that it has reserved."""
        return int(self._library.paceline_suffix_bytes(self.address))


class Drafted(NamedTuple):
    """A tree of tokens: parents come before their children, -1 is the last committed token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: Sequence[float]  # probability of the path to each token


class SuffixDrafting:
    """Makes drafts, one at a time, in memory that it keeps."""

    def __init__(self, library: Library, *, width: int) -> None:
        """`width`: most children of a token."""
        self._library = library
        self._sources = (c_void_p * SOURCES_MAX)()
        self._prices = (c_float * SUFFIX_NODES_MAX)()
        self._tokens = (c_int32 * SUFFIX_NODES_MAX)()
        self._parents = (c_int32 * SUFFIX_NODES_MAX)()
        self._confidence = (c_float * SUFFIX_NODES_MAX)()
        self._order = SuffixOrder(
            sources=addressof(self._sources),
            prices=addressof(self._prices),
            tokens=addressof(self._tokens),
            parents=addressof(self._parents),
            confidence=addressof(self._confidence),
            width=width,
        )

    def draft(
        self,
        sources: Sequence[SuffixAutomaton],
        text: np.ndarray,
        *,
        unread: int,
        longest: int,
        prices: Sequence[float],
        trust: float,
        min_confidence: float,
    ) -> Drafted:
        """Draft after `text`, int32, whose last `unread` tokens are first appended to the first source.

        `prices`: confidence at which the first, second … token pays, for later tokens the last of them. `trust`: factor
        of all probabilities."""
        assert text.dtype == np.int32, f"tokens of {text.dtype}"
        order = self._order
        for place, source in enumerate(sources):
            self._sources[place] = source.address
        order.price_count = min(len(prices), SUFFIX_NODES_MAX)
        self._prices[: order.price_count] = [*prices[:SUFFIX_NODES_MAX]]
        order.source_count, order.longest = len(sources), min(longest, SUFFIX_NODES_MAX)
        order.trust, order.min_confidence = trust, min_confidence
        recent = text[-max(unread, SUFFIX_DEPTH) :].tobytes()  # faster than taking the address of an array
        count = self._library.paceline_suffix_draft(byref(order), recent, len(recent) // TOKEN_BYTES, unread)
        if count < 0:
            raise OutOfMemory(f"no memory for {unread} more tokens of a suffix automaton")
        return Drafted(tuple(self._tokens[:count]), tuple(self._parents[:count]), self._confidence[:count])
