"""A progress bar on stderr while a model loads; nothing if stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_WIDTH = 30  # characters
CLEAR_LINE = "\r\x1b[K"


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that takes bytes done and bytes in all; None without a terminal. The end clears the bar."""
    if not sys.stderr.isatty():
        yield None
        return
    drawn = ""

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        filled = BAR_WIDTH * done // max(total, 1)
        part = f"{100 * done // max(total, 1):3}% of {total / 2**20:.0f} MiB"
        line = f"{label} {'█' * filled}{'░' * (BAR_WIDTH - filled)} {part}"
        if line != drawn:
            drawn = line
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if drawn:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
