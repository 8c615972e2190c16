"""Packs as files: a header of one page, then the memory of the pack.

    magic │ length and SHA-256 of the facts │ facts as JSON … 4096 │ weights …

A file appears under its name complete or not at all. It is checked whenever it is read: magic, facts, size, and a
checksum of all weights. It is read into memory of huge pages, not mapped: a pass over a mapped file took up to a third
longer (docs/adr/0018).
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.kernels.cpu.pack import Layout, Pack
from paceline.kernels.cpu.pack_header import HEADER_BYTES, UNFINISHED, DamagedPack, Facts, header_of, read_facts
from paceline.kernels.cpu.pool import default_threads

PIECE_BYTES = 64 << 20  # bytes read or written at a time; one call of the system takes less than 2 GiB


def read_pack(path: Path, layout: Layout, *, threads: int | None = None) -> Pack:
    """Read a pack. Raises FileNotFoundError, or DamagedPack if it is not as it was written."""
    facts = read_facts(path)
    if path.stat().st_size != HEADER_BYTES + layout.size or facts.get("bytes") != layout.size:
        raise DamagedPack("its size is wrong")
    pack = Pack(layout, threads=threads)
    with path.open("rb") as file, pack.memory.view() as view:
        _read(file.fileno(), view, threads or default_threads())
    if pack.checksum() != facts.get("checksum"):
        raise DamagedPack("its checksum is wrong")
    return pack


def _read(descriptor: int, view: memoryview, threads: int) -> None:
    """Read all weights, on several threads: most of the time goes into the first use of memory."""

    def read_piece(start: int) -> None:
        with view[start : start + PIECE_BYTES] as piece:
            _read_piece(descriptor, HEADER_BYTES + start, piece)

    with ThreadPoolExecutor(threads) as readers:
        for _ in readers.map(read_piece, range(0, len(view), PIECE_BYTES)):
            pass  # raises what a piece raised


def _read_piece(descriptor: int, place: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(descriptor, [piece[done:]], place + done)
        if not count:
            raise DamagedPack("it ends early")
        done += count


def write_pack(path: Path, pack: Pack, facts: Facts) -> None:
    """Write a finished pack under its name. Raises OSError where there is no room or no permission."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=UNFINISHED)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file, pack.memory.view() as view:
            fcntl.flock(file, fcntl.LOCK_EX)  # `sweep` leaves it alone as long as this process lives
            os.fchmod(descriptor, 0o644)  # a cache may be shared by users
            header = header_of({**facts, "bytes": pack.layout.size, "checksum": pack.checksum()})
            _write_piece(descriptor, memoryview(header))
            for start in range(0, pack.layout.size, PIECE_BYTES):
                _write_piece(descriptor, view[start : min(start + PIECE_BYTES, pack.layout.size)])
            os.fsync(descriptor)
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _write_piece(descriptor: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.write(descriptor, piece[done:])
