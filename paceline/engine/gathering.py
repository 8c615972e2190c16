"""Short prompts beside decoding sequences on a device: they wait for each other, as long as reading one takes.

    steps   r d d d d d d r d d d d d …        r: reads prompts, as long as the decoding steps (d) up to the next r

Reading few rows takes as long as launching the kernels of a pass, or reading the weights, however few they are. Where
requests come and go all the time, almost every step would read one, and decode a token for each of the others in
several times their usual time. So steps that read few rows keep a distance: decoding gets as much time as they took. A
prompt that comes later than that is read at once, as one with many rows is, or one that nobody decodes beside.
"""

from __future__ import annotations

from collections import deque

from paceline.engine.reading import TELLING_ROWS


class Gathering:
    def __init__(self) -> None:
        self._in_flight: deque[int] = deque()  # rows of prompts in each step in flight, the oldest first
        self._owed = 0.0  # seconds of decoding until short prompts may be read again

    def holds(self, rows: int) -> bool:
        """Return whether prompts with so many rows in all wait for others."""
        return rows < TELLING_ROWS and (self._owed > 0 or any(map(_is_short, self._in_flight)))

    def launched(self, rows: int) -> None:
        """Note a step with this many rows of prompts."""
        self._in_flight.append(rows)

    def landed(self, *, read: float, step: float) -> None:
        """Note the end of the oldest step. `read`, `step`: seconds that the device took for prompts, and for all of it;
        0 where they are not known."""
        rows = self._in_flight.popleft()
        if _is_short(rows):
            self._owed = read
        elif not rows:
            self._owed = max(self._owed - step, 0.0)


def _is_short(rows: int) -> bool:
    return 0 < rows < TELLING_ROWS
