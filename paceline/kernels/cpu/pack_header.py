"""The header of a pack's file: facts about the pack, and their digest. Reading it needs no torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAGIC = b"paceline pack 1\n"
HEADER_BYTES = 4096
UNFINISHED = ".tmp"  # end of the name of a file that is being written
Facts = Mapping[str, Any]


class DamagedPack(Exception):
    """A file that is no sound pack of the wanted layout."""


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts in the header of a pack."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    start = len(MAGIC) + 4 + 32
    length, digest = int.from_bytes(header[len(MAGIC) : len(MAGIC) + 4], "little"), header[start - 32 : start]
    text = header[start : start + length]
    if not header.startswith(MAGIC) or hashlib.sha256(text).digest() != digest:
        raise DamagedPack("its header is wrong")
    facts = json.loads(text)
    assert isinstance(facts, dict), "facts are an object"
    return facts


def header_of(facts: Facts) -> bytes:
    """Make the header with these facts."""
    text = json.dumps(facts).encode()
    header = MAGIC + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest() + text
    assert len(header) <= HEADER_BYTES, f"facts of {len(text)} bytes do not fit the header"
    return header.ljust(HEADER_BYTES, b"\0")


def sweep(folder: Path) -> None:
    """Remove files that a process began and did not finish because it was killed."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its writer lives
            path.unlink()
