"""Around the ways of a product: how long one takes, and a setting of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TRIES = 3  # timed runs of a way
SWEPT = 1 << 27  # bytes written before each timed run, more than caches hold


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
