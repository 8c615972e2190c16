"""Ctrl-C and SIGTERM: both raise KeyboardInterrupt in the main thread, so that a command saves what it has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_last = signal.SIGINT  # the latest signal that stopped a command


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C until the end of the block."""
    global _last
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    _last = signal.SIGINT
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted_status() -> int:
    """Exit status of a command that a signal stopped: 128 and the signal's number."""
    return 128 + _last


def _terminate(number: int, frame: FrameType | None) -> None:
    global _last
    _last = signal.SIGTERM
    raise KeyboardInterrupt
