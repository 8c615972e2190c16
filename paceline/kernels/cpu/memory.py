"""Memory for weights and KV cache: zeroed, aligned to cache lines, on huge pages where the system grants them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from paceline.errors import OutOfMemory

HUGE = 2 << 20
LINE = 64


class Region:
    """`size` bytes at `address`, mapped on their own and given back when the object goes."""

    def __init__(self, size: int, *, what: str) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, max(size, 1) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError):
            raise OutOfMemory(f"no memory for {what}: {size / 2**20:.0f} MiB were asked for") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // HUGE) * HUGE


class Arena:
    """Hands out pieces of regions, one after the other, so that what is read in order lies in order."""

    def __init__(self, *, region_size: int = 256 << 20) -> None:
        self._region_size = region_size
        self._regions: list[Region] = []
        self._used = 0

    def take(self, size: int) -> int:
        """The address of `size` zeroed bytes; they live as long as the arena."""
        if not self._regions or self._used + size > self._regions[-1].size:
            self._regions.append(Region(max(size, self._region_size), what="the model's weights"))
            self._used = 0
        address = self._regions[-1].address + self._used
        self._used += -(-size // LINE) * LINE
        return address

    @property
    def size(self) -> int:
        return sum(region.size for region in self._regions)
