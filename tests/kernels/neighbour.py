"""A busy loop on one CPU: the neighbour that tests and measurements of contention run beside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile os.getppid() > 1: pass\n"


def two_cpus() -> list[int]:
    """Two CPUs of this process, or fewer if it has fewer or the system cannot hold a thread to one."""
    return sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []


@contextmanager
def busy_loop(cpu: int) -> Iterator[None]:
    """Keep a CPU busy with another process. It ends with this one, whatever happens."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()
