"""Overlap of training prompts with evaluation texts: equal texts, or a long run of words in both.

Words are compared without case and punctuation. A text shorter than a run counts as one run: it must be equal as a
whole, so that "Hi" excludes nothing but "hi!".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

RUN_WORDS = 13  # shorter runs are shared by chance, above all in templates

_WORD = re.compile(r"\w+")


class Overlap:
    """An index of the word runs of the excluded texts."""

    def __init__(self, excluded: Iterable[str], *, run: int = RUN_WORDS) -> None:
        self._run = run
        self._runs: dict[int, str] = {}  # hash of a run → the text that contains it
        for text in excluded:
            self._runs.update(dict.fromkeys(_runs(text, run), text))

    def find(self, text: str) -> str | None:
        """Return an excluded text that shares a run with this one."""
        return next((self._runs[run] for run in _runs(text, self._run) if run in self._runs), None)


def separate(texts: Sequence[str], excluded: Iterable[str], *, run: int = RUN_WORDS) -> tuple[list[int], list[int]]:
    """Return the indices of the texts that share no run with an excluded text, and of those that do."""
    overlap = Overlap(excluded, run=run)
    clean: list[int] = []
    overlapping: list[int] = []
    for index, text in enumerate(texts):
        (overlapping if overlap.find(text) else clean).append(index)
    return clean, overlapping


def _runs(text: str, length: int) -> Iterator[int]:
    words = _WORD.findall(text.lower())
    for start in range(max(1, len(words) - length + 1)):
        yield hash(tuple(words[start : start + length]))
