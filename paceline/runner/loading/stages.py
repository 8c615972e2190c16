"""Times of the stages of loading, and the memory so far, in the log that `--verbose` shows."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Log how long a stage took, the CPU time of all threads meanwhile, and the peak memory of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        seconds, busy = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB on Linux
        logger.debug("%s: %.2f s, %.2f s of CPU, peak memory %.0f MiB", what, seconds, busy, peak)
