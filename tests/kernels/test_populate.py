"""Memory that the system is asked for before it is used."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from paceline.kernels.cpu import populate
from paceline.kernels.cpu.populate import AHEAD_BYTES, Populated


class Worker:
    """Runs what it is given at once, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def submit(self, call: Any, address: int, length: int) -> None:
        assert call is populate._populate
        self.spans.append((address, length))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(populate, "_worker", lambda: made)
    return made


def test_memory_is_asked_for_ahead_of_its_use_and_once(worker: Worker) -> None:
    size = 3 * AHEAD_BYTES + 4096
    memory = Populated(mmap.PAGESIZE * 10, size)
    assert worker.spans == [(mmap.PAGESIZE * 10, AHEAD_BYTES)]
    for used in range(0, size + 1, 4096):
        memory.reach(used)
        provided = sum(length for _, length in worker.spans)
        assert provided >= min(used + AHEAD_BYTES // 2, size), f"behind {used}"
    ends = [address + length for address, length in worker.spans]
    assert [address for address, _ in worker.spans[1:]] == ends[:-1]
    assert ends[-1] == mmap.PAGESIZE * 10 + size


def test_pages_that_others_share_are_not_asked_for(worker: Worker) -> None:
    Populated(mmap.PAGESIZE + 1, 3 * mmap.PAGESIZE)
    assert worker.spans == [(2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)]
    worker.spans.clear()
    Populated(mmap.PAGESIZE + 1, 100)
    assert not worker.spans


def test_what_is_written_stays() -> None:
    values = np.arange(1 << 20, dtype=np.int64)
    populate._populate(values.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, values.nbytes)
    assert (values == np.arange(1 << 20)).all()


def test_a_system_that_cannot_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "_worker", lambda: None)
    Populated(0, 4 * AHEAD_BYTES).reach(3 * AHEAD_BYTES)
