"""Is a training prompt among the texts that the drafter will be measured on? Equal texts and long shared runs of words.

Words are compared without case and punctuation. A text shorter than a run counts as one run: it must be equal as a
whole, so that "Hi" excludes nothing but "hi!".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

RUN = 13  # words; shorter runs are shared by chance, above all in templates

_WORD = re.compile(r"\w+")


class Overlap:
    def __init__(self, excluded: Iterable[str], *, run: int = RUN) -> None:
        self._run = run
        self._runs: dict[int, str] = {}  # hash of a run → the text it is from
        for text in excluded:
            self._runs.update(dict.fromkeys(_runs(text, run), text))

    def find(self, text: str) -> str | None:
        """The excluded text that shares a run with this one."""
        return next((self._runs[run] for run in _runs(text, self._run) if run in self._runs), None)


def split(texts: Sequence[str], excluded: Iterable[str], *, run: int = RUN) -> tuple[list[int], list[int]]:
    """Indices of the texts that may be used, and of those that overlap."""
    overlap = Overlap(excluded, run=run)
    clean: list[int] = []
    shared: list[int] = []
    for index, text in enumerate(texts):
        (shared if overlap.find(text) else clean).append(index)
    return clean, shared


def _runs(text: str, length: int) -> Iterator[int]:
    words = _WORD.findall(text.lower())
    for start in range(max(1, len(words) - length + 1)):
        yield hash(tuple(words[start : start + length]))
