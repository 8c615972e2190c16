"""Steps that a device runs without the host: what is asked of it, and an implementation for any torch device.

A step is launched and landed. `launch` says which sequences take part and returns at once; the device reads the chunks
of prompts, then runs one *round* over all seats: draft, verify, accept. Tokens, lengths and page tables live on the
device (`runner.rounds.device_state`), so that a step can be launched before the one before it has come to an end;
`collect` says what became of it.

    host      launch 1 │ launch 2 │ collect 1 │ launch 3 │ collect 2 │ …
    device             │ step 1 ······│ step 2 ········│ step 3 ······

What always holds: steps take effect in the order of their launches, `write` and `set_pages` before the launches that
follow them; nothing waits for the device but `collect`; a device never writes to a page that is not in the lane's part
of the page table (or is the scratch page).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.sampling.sampler import Sampler

Ticket = Any
"""Whatever a `launch` hands out for its `collect`."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One decoding sequence of a round, with at most `max_draft` drafted tokens; 0: plain."""

    lane: int
    max_draft: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed tokens [start, start + count) of a lane to be read."""

    lane: int
    start: int
    count: int
    draws: bool  # the last committed token is among them: draw and append the next one
    target: bool = True  # the target reads them
    drafts: bool = False  # the drafter of the launch reads them


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of a seat or of a chunk that draws: `tokens` are the accepted drafted ones and the target's own."""

    accepted: int
    drafted: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the device; 0.0 where unknown."""

    step: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0


class Rounds(Protocol):
    """Steps on a device. One thread, calls in order; nothing waits for the device but `collect`."""

    drafters: Collection[str]  # those that the device can run
    readers: Collection[str]  # of them, those with a KV memory of their own: they must read what a lane says
    max_draft: int  # of a seat
    synthetic_acceptance: float  # above 0: a coin decides on drafted tokens, for measurements; set before any launch

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        """A sequence enters the lane, or the host has changed it: its committed tokens int32 [length] and what is
        asked of sampling. The lane has no pages until they are set."""

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        """Entries `first`, first + 1, … of the lane's page table."""

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], *, drafter: str | None, context: int) -> Ticket:
        """Read the chunks, in order, then run a round over the seats. `drafter` reads and drafts; no sequence of the
        step can get longer than `context`. A seat that drafts with a reader has had all positions read by it but the
        last two committed ones, which a reader's first pass reads anyway.

        Where a sequence has ended in the air, its length and draft may go beyond the context, by `max_draft` + 1 tokens
        at most: lanes have that much room, and what a model makes of those positions is never heard."""

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        """Wait for a step, each once and in order: chunks (None where nothing was drawn), seats, times."""

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        """How long a round of so many seats takes where each has so many drafted tokens of this drafter; None: not
        known. Without a draft it is a plain round, whoever might have drafted."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The n-gram drafter, run by the device."""

    min_ngram: int = 1
    max_ngram: int = 6


def read_landed(row: Sequence[int]) -> Landed:
    """From what acceptance writes for a seat: accepted │ drafted │ new tokens [k + 1] │ drafted tokens [k] │ …"""
    accepted, drafted = row[0], row[1]
    longest = len(row) // 2 - 2
    old = row[3 + longest : 3 + longest + drafted]
    return Landed(accepted=accepted, drafted=tuple(old), tokens=tuple(row[2 : 3 + accepted]))
