"""The folder of cached packs: its entries, its size, and how old entries make room for new ones. It needs no torch."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cache_home import cache_home
from paceline.errors import InvalidRequest
from paceline.kernels.cpu.pack_header import DamagedPack, read_facts, sweep
from paceline.models.digest import digest_folder
from paceline.runner.forwards.measuring import forget_measurements
from paceline.sizes import parse_size

logger = logging.getLogger(__name__)
DEFAULT_SIZE = "10G"
SIZE_VARIABLE = "PACELINE_CACHE_SIZE"


@dataclass(frozen=True, slots=True)
class Entry:
    """A pack in the cache."""

    path: Path
    model: str
    format: str
    variant: str
    bytes: int
    used: float  # seconds since the epoch


def pack_folder() -> Path:
    return cache_home() / "packed"


def cache_limit() -> int:
    """Return the bytes that all packs together may have; 0: no cache."""
    text = os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE
    if (size := parse_size(text)) is None:
        raise InvalidRequest(f"{SIZE_VARIABLE} is {text!r:.50}; give a size such as 10G, or 0 for no cache")
    return size


def entries() -> list[Entry]:
    """List the packs, the least recently used first."""
    found = []
    for path in pack_folder().glob("*.pack"):
        with suppress(OSError):  # removed meanwhile
            found.append(_entry(path))
    return sorted(found, key=lambda entry: entry.used)


def _entry(path: Path) -> Entry:
    state = path.stat()
    try:
        facts = read_facts(path)
    except (DamagedPack, ValueError):
        facts = {}
    model, format, variant = (str(facts.get(name, "damaged")) for name in ("model", "format", "variant"))
    return Entry(path, model, format, variant, bytes=state.st_size, used=state.st_mtime)


def make_room(size: int) -> None:
    """Remove packs until another of this size fits."""
    there = entries()
    while there and sum(entry.bytes for entry in there) + size > cache_limit():
        oldest = there.pop(0)
        logger.debug("removing the packed weights of %s, to make room", oldest.model)
        oldest.path.unlink(missing_ok=True)


def clear() -> int:
    """Remove all packs, digests and measurements, and return the bytes of the packs."""
    there = entries()
    for entry in there:
        entry.path.unlink(missing_ok=True)
    sweep(pack_folder())
    shutil.rmtree(digest_folder(), ignore_errors=True)
    forget_measurements()
    return sum(entry.bytes for entry in there)
