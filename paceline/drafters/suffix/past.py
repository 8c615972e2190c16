"""Past answers: a bounded memory of suffix automata, apart for every salt.

How long a request takes tells whether its text was known. So answers under one salt never serve another salt, as with
the prefix cache.

A salt has two generations of automata. Answers enter the young one. When it is full, it becomes the old one, and what
was old is dropped. If all salts together take too much, generations of the salts that were not used for the longest
time are dropped, the old one first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.suffix import SuffixAutomaton

YOUNG_SHARE = 0.5  # part of the memory that a young generation may reserve


@dataclass(slots=True)
class _Generations:
    young: SuffixAutomaton
    old: SuffixAutomaton | None = None

    @property
    def bytes(self) -> int:
        return self.young.bytes + (self.old.bytes if self.old else 0)


class PastAnswers:
    def __init__(self, library: Library, *, memory: int) -> None:
        """`memory`: bytes that all automata together may reserve."""
        self._library = library
        self._memory = memory
        self._salts: OrderedDict[str, _Generations] = OrderedDict()  # the latest used last
        self.bytes = 0  # that all automata have reserved

    def sources(self, salt: str) -> list[SuffixAutomaton]:
        """Return the automata with the past answers under a salt."""
        if salt not in self._salts:
            return []
        self._salts.move_to_end(salt)
        found = self._salts[salt]
        return [found.young, found.old] if found.old else [found.young]

    def learn(self, salt: str, tokens: np.ndarray) -> None:
        """Remember an answer, int32 tokens."""
        mine = self._salts.pop(salt, None)
        self.bytes -= 0 if mine is None else mine.bytes
        mine = mine or _Generations(SuffixAutomaton(self._library))
        mine.young.extend(tokens)
        mine.young.end_text()
        if mine.young.bytes > YOUNG_SHARE * self._memory:
            mine.old, mine.young = mine.young, SuffixAutomaton(self._library)
        self._salts[salt] = mine
        self.bytes += mine.bytes
        self._evict()

    def _evict(self) -> None:
        """Drop old generations, then young ones, of the salts that were used least recently."""
        while self.bytes > self._memory and self._salts:
            salt, eldest = next(iter(self._salts.items()))
            self.bytes -= eldest.bytes
            if eldest.old is None:
                del self._salts[salt]
            else:
                eldest.old = None
                self.bytes += eldest.bytes
