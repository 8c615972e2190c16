"""Memory for weights and KV cache: zeroed, aligned to cache lines, on huge pages where the system grants them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from paceline.errors import OutOfMemory

HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64
REGION_BYTES = 256 << 20  # least size of a region of the arena


class Region:
    """`size` bytes at `address`: a mapping of its own, unmapped with the object."""

    def __init__(self, size: int, *, what: str) -> None:
        """Map the memory. `what` names its purpose in the error if there is no memory."""
        self.size = size
        try:
            self._map = mmap.mmap(-1, max(size, 1) + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError):
            raise OutOfMemory(f"no memory for {what}: {size / 2**20:.0f} MiB were asked for") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


class Arena:
    """Hands out pieces of large regions one after the other: weights that are read in order are adjacent."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._used = 0  # bytes of the last region

    def take(self, size: int) -> int:
        """Return the address of `size` zeroed bytes; they are valid as long as the arena exists."""
        if not self._regions or self._used + size > self._regions[-1].size:
            self._regions.append(Region(max(size, REGION_BYTES), what="the model's weights"))
            self._used = 0
        address = self._regions[-1].address + self._used
        self._used += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return address
