"""Chunks of the dummy lane in the shapes of traffic: reading them at the start compiles the kernels of prompts.

A kernel that is first wanted in a step would make every sequence wait for its compilation, up to a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.kernels.cuda.division import ALONE
from paceline.runner.rounds.protocol import Chunk

# Rows of sequences that are read several at once, the longest of them up to LONG: prompts have their own attention from
# 65 rows on, and below blocks of attention by their rows. A drafter that catches up reads few rows of many sequences.
SHORT, LONG = 16, 128


def counts(sizes: Sequence[int], kv_heads: Sequence[int]) -> list[int]:
    """Return numbers of sequences that meet every division of attention among programs: those of rounds, and the most
    of which each KV head of a model has a multiprocessor of its own. `sizes`: seats of rounds."""
    return sorted({*sizes, *(ALONE // heads for heads in kv_heads if ALONE // heads <= max(sizes))} - {0})


def prompts(lane: int, *, counts: Sequence[int], longest: int, most: int, drafts: bool) -> Iterator[list[Chunk]]:
    """Yield one prompt of 1, 2, 4 … rows, `longest` at most, then `counts` at once, the longest of them with 1, 2, 4 …
    rows. A step has `most` rows, at most.

    `drafts`: a drafter reads along."""

    def read(*counts: int) -> list[Chunk]:
        return [Chunk(lane, 0, count, draws=True, drafts=drafts) for count in counts]

    longest = min(longest, most)
    for rows in _counts(1, longest):
        yield read(rows)
    for first in _counts(1, min(LONG, longest)):
        for count in (count for count in counts if 1 < count <= 1 + most - first):
            yield read(first, *[min(SHORT, first, (most - first) // (count - 1))] * (count - 1))


def held(lane: int, *, lanes: int) -> Iterator[list[Chunk]]:
    """Yield 1, 2, 4 … `lanes` sequences whose held states a head reads."""
    for count in _counts(1, lanes):
        yield [Chunk(lane, 0, 1, draws=False, target=False, drafts=True)] * count


def _counts(least: int, most: int) -> Iterator[int]:
    """Yield the powers of two from `least` on that are below `most`, and `most` itself if it is no smaller."""
    yield from _powers(least, most - 1)
    if most >= least:
        yield most


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield the powers of two from `least`, which is one, up to `most`."""
    power = least
    while power <= most:
        yield power
        power *= 2
