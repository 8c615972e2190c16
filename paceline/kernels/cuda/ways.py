"""Around the ways of a product: those that are known, how long one takes, and a setting of the library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

TRIES = 3  # timed runs of a way
SWEPT = 1 << 27  # bytes written before each timed run, more than caches hold
Way = Callable[..., None]

_compares: ContextVar[bool] = ContextVar("_compares", default=True)


def compares() -> bool:
    """Return False within a block of `without_comparing`."""
    return _compares.get()


@contextmanager
def without_comparing() -> Iterator[None]:
    """Let products within the block take a way at once: a step would wait milliseconds for a comparison."""
    token = _compares.set(False)
    try:
        yield
    finally:
        _compares.reset(token)


class KnownWays:
    """Ways that compute a product with the right bits, the best first, by kind of product and number of rows."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, Sequence[Way]]] = defaultdict(dict)

    def of(self, kind: Hashable, rows: int) -> Sequence[Way]:
        """Return the ways for this number of rows; (): it is not known."""
        return self._known[kind].get(rows, ())

    def near(self, kind: Hashable, rows: int) -> Sequence[Way]:
        """Return the ways for the next larger known number of rows, or else for the largest; (): none is known."""
        known = self._known[kind]
        return known[min((count for count in known if count > rows), default=max(known))] if known else ()

    def add(self, kind: Hashable, rows: int, ways: Sequence[Way]) -> None:
        self._known[kind][rows] = ways


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Measure the best time of a run on the device, with cold caches."""
    swept = torch.empty(SWEPT, dtype=torch.uint8, device=device)
    found = []
    for _ in range(TRIES):
        for _ in range(4):  # long enough for the host to launch what follows
            swept.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) / 1e3)
    return min(found)


@contextmanager
def whole_sums() -> Iterator[None]:
    """Forbid the library to divide K within the block. Only cuBLASLt can be told so."""
    settings, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction_split_k
    torch.backends.cuda.preferred_blas_library("cublaslt")
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(library)
