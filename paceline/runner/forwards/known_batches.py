"""A cache of what a compiled program has prepared for a batch, found again by the batch's identity.

Batches come back: `runner.batch` writes a new batch into the memory of an earlier one of the same shape, and returns
the same Batch object. So addresses, C structures and memory for results are prepared once for an object. It matters
because the caches are cold after a forward pass: reading a tensor's fields costs microseconds, making one costs tens
(docs/experiments.md, "The host between passes").

The key is `id(batch)`, since a hash of the contents would have to read them. An id belongs to an object only while that
object lives; a later object may get the same one. Therefore an entry holds its batch: as long as the entry exists, no
other batch can have its id.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.kernels.base import Batch

MAX_CACHED_BATCHES = 256  # entries; the cache is emptied when it has as many

T = TypeVar("T")


class KnownBatches(Generic[T]):
    """A cache of prepared values by Batch object; emptied when it is full, or when the memory they point to moves."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Batch, T]] = {}

    def get(self, batch: Batch) -> T | None:
        entry = self._entries.get(id(batch))
        return None if entry is None else entry[1]

    def put(self, batch: Batch, prepared: T) -> T:
        """Keep and return `prepared`, in place of what was prepared for this batch before."""
        if len(self._entries) == MAX_CACHED_BATCHES:
            self._entries.clear()
        self._entries[id(batch)] = batch, prepared
        return prepared

    def clear(self) -> None:
        self._entries.clear()
