from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

if "PACELINE_GPU" not in os.environ:  # before anything imports Triton: kernels then run as Python, on the CPU
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches for the network
# Not the user's cache; the same for all runs, because compiling the kernels takes long.
os.environ["PACELINE_CACHE"] = f"{tempfile.gettempdir()}/paceline-tests-{os.getuid()}"
os.environ["PACELINE_CACHE_SIZE"] = "1G"
os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/paceline-tests-{os.getuid()}/state-{os.getpid()}"  # nor state

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread only costs

UNWATCHED = pytest.StashKey[bool]()
LAWS = "tests/laws/"

with suppress(ModuleNotFoundError):  # on a GPU's machine, whose tests do without
    import hypothesis

    # The same examples on every run: a failure is one of the code, not of the day.
    hypothesis.settings.register_profile("paceline", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("paceline")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Begin every test with the same random numbers, whichever ran before it in this process."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of every later search for garbage: a million objects that never go."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Choose what coverage does not watch: laws, and tests that are marked so, wholly or all of their cases but one.

    They run the same lines thousands of times, at two to four times the time under its eyes."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        mark = item.get_closest_marker("unwatched")
        repeats = mark is not None and (cases[test] > 1 or mark.kwargs.get("wholly", False))
        item.stash[UNWATCHED] = repeats or test.startswith(LAWS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.stash[UNWATCHED]:
        return (yield)
    with unwatched():
        return (yield)


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide what runs inside from coverage, threads that begin there too."""
    trace, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)
        threading.settrace(of_threads)
