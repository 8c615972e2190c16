"""Atomic files: each is written beside its place, forced to the disk, then renamed.

A process that is killed meanwhile leaves the old file, or none, and a temporary file that the next write replaces. A
full disk raises `StorageError` and leaves every earlier file as it was.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import ModelFileError, StorageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise _storage_error(path, len(data), error) from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: str = "") -> None:
    """Write a safetensors file; `note` goes into the header."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata={"note": note, "format": "pt"}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a safetensors file and the note in its header."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        return load(data), str(header.get("__metadata__", {}).get("note", ""))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelFileError(f"{path}: not readable ({error}); remove it to have it made anew") from error


def replace_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Replace the folder at `path` by one with exactly these files. Other processes see the old folder or the new one,
    and for an instant none."""
    fresh, old = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)  # usually absent
    for name, data in files.items():
        write_bytes(fresh / name, data)
    if path.exists():
        os.rename(path, old)
    os.rename(fresh, path)
    shutil.rmtree(old, ignore_errors=True)  # the new folder is in place: a leftover does no harm


def tensors_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file without a note."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={"format": "pt"})


def _storage_error(path: Path, size: int, error: OSError) -> StorageError:
    if error.errno in DISK_FULL:
        return StorageError(
            f"{path}: the disk is full, {size / 2**20:.1f} MiB could not be written; nothing that was there is lost: "
            "make room and give the same command again"
        )
    return StorageError(f"{path}: cannot be written ({error.strerror}); choose another place with --out")
