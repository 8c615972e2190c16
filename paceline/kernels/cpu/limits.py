"""The arithmetic limit of the CPU kernels on this machine, measured by loops of the running variant (limits.c)."""

from __future__ import annotations

from ctypes import c_double
from dataclasses import dataclass

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pool import default_threads, thread_pool


@dataclass(frozen=True, slots=True)
class Limits:
    """Multiply-adds a second that all threads together do at best."""

    variant: str
    threads: int
    bytes: float  # 8-bit products
    floats: float  # of attention


def measure_limits(threads: int | None = None) -> Limits:
    """Measure all threads at once; `threads` None: as many as the kernels use."""
    library, count = load_library(), threads or default_threads()
    bytes, floats = (c_double * count)(), (c_double * count)()
    library.paceline_limits(thread_pool(library, count), bytes, floats)
    return Limits(library.variant, count, sum(bytes), sum(floats))
