"""Memory for weights and KV cache: zeroed, aligned to cache lines, on huge pages where the system grants them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from paceline.errors import OutOfMemory

HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64


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
        self._offset = self.address - start

    def view(self) -> memoryview:
        """Return the memory as bytes that can be read and written."""
        return memoryview(self._map)[self._offset : self._offset + self.size]
