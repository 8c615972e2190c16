"""The pace of streams on their way to Ray's proxy: tokens that come faster than the way takes them go together.

Ray takes a fixed time for each chunk, mostly on the thread of a replica on which the engine does its host work, too. So
a stream rests after a chunk that followed the one before closely, until its answer is complete. The rest grows with the
number of open streams, and a replica hands over about 1 / REST_SECONDS chunks a second at most, however fast its tokens
come. Where a step takes longer than that, no chunk waits. Events of the stream stay as they are: several travel in one
message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.stream import Stream

REST_SECONDS = 0.003  # of a stream after a chunk, for each open stream (docs/experiments.md, "Chunks through Ray")
MAX_REST_SECONDS = 0.1  # beyond which a reader would see text come in jerks


class Pace:
    """The pace of all streams of a replica."""

    def __init__(self) -> None:
        self.open = 0  # streams that have begun and not ended

    @property
    def rest(self) -> float:
        """Seconds that a stream rests after a chunk."""
        return min(REST_SECONDS * self.open, MAX_REST_SECONDS)

    @contextmanager
    def stream(self) -> Iterator[PacedStream]:
        """Make the rests of one answer, which counts as an open stream from its first chunk on."""
        stream = PacedStream(self)
        try:
            yield stream
        finally:
            self.open -= stream.begun


class PacedStream:
    """Implements Pacing."""

    def __init__(self, pace: Pace) -> None:
        self.begun = False
        self._pace = pace
        self._free = 0.0  # when the stream had last sent a chunk and rested

    async def rest(self, events: Stream) -> None:
        now = asyncio.get_running_loop().time
        if not self.begun:
            self.begun, self._pace.open = True, self._pace.open + 1
        elif now() - self._free < self._pace.rest:
            await events.rest(self._pace.rest)
        self._free = now()
