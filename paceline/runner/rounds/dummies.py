"""Chunks of the dummy lane in the shapes of traffic: reading them at the start compiles the kernels of prompts.

A kernel that is first wanted in a step would make every sequence wait for its compilation, up to a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.runner.rounds.protocol import Chunk

# Rows of prompts that are read several at once: fewer and more than the 64 from which prompts have their own attention.
SHORT, LONG = 16, 128


def prompts(lane: int, *, lanes: int, most: int, drafts: bool) -> Iterator[list[Chunk]]:
    """Yield one prompt of 16, 32, 64 … rows, then 2, 4, 8 … `lanes` at once, short and long; at most `most` rows.

    `drafts`: a drafter reads along."""
    for rows in _powers(SHORT, most):
        yield [Chunk(lane, 0, rows, draws=True, drafts=drafts)]
    for rows in (SHORT, LONG):
        for count in _counts(2, min(lanes, most // rows)):
            yield [Chunk(lane, 0, rows, draws=True, drafts=drafts)] * count


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
