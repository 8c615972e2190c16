"""Places of tables within one piece of memory.

Triton compiles a kernel anew for an address that is no multiple of 16 bytes. If tables of any size begin at such
multiples, each kernel is compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence

BYTES = 16  # an address that is a multiple of it is aligned
NUMBERS = BYTES // 4  # as many bytes, in numbers of 32 bits


def aligned(count: int, to: int = NUMBERS) -> int:
    """Round a size up, so that what follows it is aligned."""
    return -(-count // to) * to


def places(sizes: Sequence[int], to: int = NUMBERS) -> tuple[list[slice], int]:
    """Lay out tables of these sizes one after the other: the place of each, and the size of the whole."""
    found, begin = [], 0
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += aligned(size, to)
    return found, begin
