"""Memory in which the ranks of a split model add partial sums: all of them map it, and exchange.c uses it.

It has no name. Rank 0 makes it and hands its descriptor to the processes that it starts, so nothing is left of it when
they end, however they end. Memory that no sum has used takes no room.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from ctypes import addressof, c_int32

from paceline.kernels.cpu import abi


def new_segment(size: int) -> int:
    """Make the memory of `size` ranks, zeroed, and return a descriptor of it, which the caller closes."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-ranks")
    else:  # not Linux: a file without a name
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size * abi.RANK_BYTES)
    return descriptor


class Segment:
    """The memory as one rank maps it. It must outlive the programs that add in it."""

    def __init__(self, descriptor: int, *, rank: int, size: int, timeout: float, pipes: Sequence[int] = ()) -> None:
        """`timeout`: seconds that another rank may take to hand over a sum. `pipes`: sockets that other ranks close
        when they end."""
        assert rank < size <= abi.RANKS_MAX, f"rank {rank} of {size}"
        self.rank, self.size = rank, size
        self._map = mmap.mmap(descriptor, size * abi.RANK_BYTES)
        self._pipes = (c_int32 * max(1, len(pipes)))(*pipes)
        memory = addressof(ctypes.c_char.from_buffer(self._map))
        patience = int(timeout * 1e9)
        self._structure = abi.Segment(memory, addressof(self._pipes), patience, rank, size, len(pipes))

    @property
    def address(self) -> int:
        """Return the address of the C structure, which a Shape points to."""
        return addressof(self._structure)
