"""Progress of long work: one line of a terminal, drawn anew in its place, or a line in the log every few seconds.

A thread of its own shows it, so that a machine that is busy for minutes inside one call is not silent either. Work that
ends within `LOG_SECONDS` logs nothing.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # shown by commands that show only warnings otherwise

BAR_WIDTH = 30  # characters
CLEAR_LINE = "\r\x1b[K"
DRAW_SECONDS = 0.2  # between two drawings of the line on a terminal
LOG_SECONDS = 5.0  # between two lines in a log
BYTES = "bytes"


class Progress:
    """How far a piece of work is. Set from any thread, by a call or a phase."""

    def __init__(self, doing: str, *, unit: str = BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase(doing, unit=unit)

    def phase(self, doing: str, *, unit: str = "", total: int = 0, done: int = 0) -> None:
        """Begin the next part of the work. `unit`: what is counted; `total`: how many there are, 0 if unknown; `done`:
        how many of them were done before."""
        self.doing, self.unit, self.done, self.total, self.note = doing, unit, done, total, ""
        self._began, self._first = self._clock(), done

    def __call__(self, done: int, total: int) -> None:
        if done < self.done:  # the next file of the same phase
            self._began, self._first = self._clock(), done
        self.done, self.total = done, total

    def count(self) -> None:
        """Count one more."""
        self.done += 1

    def line(self, *, bar: bool = False) -> str:
        done, total, parts = self.done, self.total, [self.note] if self.note else []
        share = min(1.0, done / total) if total else 0.0
        drawn = f" {'█' * int(BAR_WIDTH * share)}{'░' * (BAR_WIDTH - int(BAR_WIDTH * share))}" if bar and total else ""
        seconds, fresh = self._clock() - self._began, done - self._first
        left = f", about {_time(seconds * (total - done) / fresh)} left" if fresh > 0 and done < total else ""
        counted = [self._counted()] if done or total else []
        return f"{self.doing}{drawn or ':'} {' · '.join([*counted, *parts, f'{_time(seconds)}{left}'])}"

    def _counted(self) -> str:
        if self.unit == BYTES:
            return f"{100 * self.done // max(self.total, 1):3}% of {self.total / 2**20:.0f} MiB"
        of = f" of {self.total}" if self.total else ""
        return f"{self.done}{of} {self.unit}".rstrip()


@contextmanager
def progress_bar(doing: str, *, unit: str = BYTES) -> Iterator[Progress]:
    """Show a piece of work until the end of the block. Yields what takes how much is done, and of how much."""
    shown, ended = Progress(doing, unit=unit), threading.Event()
    terminal = sys.stderr.isatty()
    show, seconds = (_draw, DRAW_SECONDS) if terminal else (_log, LOG_SECONDS)
    ticker = threading.Thread(target=_tick, args=(shown, ended, show, seconds), name="progress", daemon=True)
    if terminal:
        _draw(shown)
    ticker.start()
    try:
        yield shown
    finally:
        ended.set()
        ticker.join()
        if terminal:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _tick(shown: Progress, ended: threading.Event, show: Callable[[Progress], None], seconds: float) -> None:
    while not ended.wait(seconds):
        show(shown)


def _draw(shown: Progress) -> None:
    line = shown.line(bar=True)[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be cleared
    print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)


def _log(shown: Progress) -> None:
    logger.info("%s", shown.line())


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
