"""The digest of a model's files: SHA-256 of their bytes, remembered by the state of each file.

Reading a gigabyte at every start would take longer than all the rest. So a digest is kept in the cache beside the
file's inode, size, and times of change in nanoseconds, and used while these are the same. The time of a change of
status (ctime) cannot be set by programs: whoever writes to a file, or puts another in its place, changes it.

A digest is not kept for a file that was changed less than two seconds ago: a second write could fall into the same tick
of the file system's clock. Two risks remain. A network file system may report old times for a while. And a program that
writes through a shared mapping changes the times only when the system gets to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cache_home import cache_home

logger = logging.getLogger(__name__)
RACY_SECONDS = 2.0  # age that a file must have for its digest to be kept
State = list[int]


def file_state(path: Path) -> State:
    """Return inode, size and times of change: the numbers that differ if the file does."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def files_digest(paths: Sequence[Path]) -> str:
    """Return one digest of several files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(bytes.fromhex(_file_digest(path)))
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    path = path.resolve()
    note, state = digest_folder() / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json", file_state(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(note.read_text())
        if kept["state"] == state and len(bytes.fromhex(kept["sha256"])) == 32:
            return str(kept["sha256"])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if file_state(path) == state and time.time() - max(state[2:]) / 1e9 > RACY_SECONDS:
        _keep(note, {"path": str(path), "state": state, "sha256": found})
    return found


def digest_folder() -> Path:
    return cache_home() / "digests"


def _keep(note: Path, facts: dict[str, object]) -> None:
    """Write a note. Without a writable cache nothing is kept, and the next start reads the file again."""
    fresh = note.with_suffix(f".{os.getpid()}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(facts))
        os.replace(fresh, note)
    except OSError as error:
        logger.debug("the digest of %s is not kept: %s", facts["path"], error)
