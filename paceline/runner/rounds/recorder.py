"""Record launches as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Recorder:
    """Records launches as graphs that share one pool of memory, which is safe as long as they run one by one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record launches whose kernels are compiled and whose buffers exist. The device may be busy meanwhile.

        No garbage is collected while recording: the end of another engine's graph would break the record."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _without_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
