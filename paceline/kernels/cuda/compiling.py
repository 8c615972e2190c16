"""Compile and load kernels on several threads before they are launched.

A launch compiles its kernel first, and a pass needs its kernels one after the other. So a pass is run once without any
launch: it only says which kernels it needs, and they are compiled beside each other. Nothing is compiled twice, and
what Triton finds in its cache on disk is not compiled at all. Each is loaded as well, for which Triton runs a compiler
of C once for each kind of arguments; otherwise the first launch would wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from triton import AsyncCompileMode, JITFunction

MAX_THREADS = 16  # most of a compilation needs no lock of Python, but not all of it

_only_compiling: ContextVar[bool] = ContextVar("_only_compiling", default=False)
_rehearsing: ContextVar[bool] = ContextVar("_rehearsing", default=False)


def only_compiling() -> bool:
    """Return True within a block of `compiling`: kernels are not launched, and results mean nothing."""
    return _only_compiling.get()


def rehearsing() -> bool:
    """Return True within a block of `rehearsal` or `compiling`."""
    return _rehearsing.get() or _only_compiling.get()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Run passes within the block for their kernels and their memory alone: one layer of each kind is enough."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


class Loader(ThreadPoolExecutor):
    """Threads that compile kernels, and load each on the device."""

    def submit(self, compile: Callable[[], Any], /, *args: Any, **options: Any) -> Future[Any]:
        def load() -> Any:
            kernel = compile(*args, **options)
            kernel.run  # noqa: B018 - it is a property that loads the kernel
            return kernel

        return super().submit(load)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels of all launches within the block instead of launching them."""
    launch = JITFunction.run

    def compile(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=True, **options)

    with Loader(min(MAX_THREADS, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
        JITFunction.run, token = compile, _only_compiling.set(True)
        try:
            yield
        finally:
            JITFunction.run = launch
            _only_compiling.reset(token)
