"""Threads beside a busy neighbour: a suspended one is lent a CPU, no bit changes, and the caller is set free again."""

from __future__ import annotations

import os
import time
from ctypes import byref, c_uint64

import numpy as np
import pytest

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.memory import Region
from paceline.kernels.cpu.pool import seats, thread_pool
from paceline.kernels.cpu.topology import read_machine
from tests.kernels.neighbour import busy_loop

PATIENCE_SECONDS = 60  # until a thread was suspended in the middle of its units; it takes milliseconds
SIZE = 32 << 20  # bytes to read: as long as a time slice, so that threads are suspended on the way


def checksum(pool: int, memory: Region) -> int:
    found = c_uint64()
    assert load_library().paceline_checksum(pool, memory.address, memory.size, byref(found)) == 0
    return found.value


def test_a_suspended_thread_is_lent_a_cpu() -> None:
    machine = read_machine()
    held = seats(machine, len(machine.cores))
    if not all(held):
        pytest.skip("two cores of Linux are needed")
    memory, library, allowed = Region(SIZE, what="a test"), load_library(), os.sched_getaffinity(0)
    np.frombuffer(memory.view(), dtype=np.uint8)[:] = np.random.default_rng(0).integers(256, size=SIZE, dtype=np.uint8)
    wanted, pool = checksum(thread_pool(library, 1), memory), thread_pool(library, len(held))
    before, end = library.paceline_lent(pool), time.monotonic() + PATIENCE_SECONDS
    with busy_loop(held[-1][0]):
        while library.paceline_lent(pool) < before + 3:
            assert time.monotonic() < end, "no thread was lent a CPU"
            assert checksum(pool, memory) == wanted
            assert os.sched_getaffinity(0) == allowed, "the caller is held to a core during a run alone"
    assert checksum(pool, memory) == wanted
