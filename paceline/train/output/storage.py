"""Files that are there whole or not at all: written beside their place, forced to the disk, then renamed.

A process that is killed in the middle leaves the old file, or none, and a temporary one that the next write replaces. A
disk that is full gives `StorageError` and leaves everything written before as it was.
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

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import ModelFileError, StorageError

FULL = (errno.ENOSPC, errno.EDQUOT)


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
    """As safetensors; `note` is kept in the header."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata={"note": note, "format": "pt"}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Tensors and the note."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        return load(data), str(header.get("__metadata__", {}).get("note", ""))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelFileError(f"{path}: not readable ({error}); remove it to have it made anew") from error


def replace_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Put a folder with exactly these files in the place of `path`; whoever looks sees the old one or the new one, or
    for an instant none."""
    fresh, old = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)  # mostly there is none
    for name, data in files.items():
        write_bytes(fresh / name, data)
    if path.exists():
        os.rename(path, old)
    os.rename(fresh, path)
    shutil.rmtree(old, ignore_errors=True)  # the new one is in place: what is left does no harm


def tensors_file(tensors: Mapping[str, Tensor]) -> bytes:
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={"format": "pt"})


def same_seed(*parts: int) -> torch.Generator:
    """A generator that depends on nothing but these numbers: nothing random has to be stored to go on after a kill."""
    state = 0
    for part in parts:
        state = (state * 1_000_003 + part + 1) % (1 << 62)
    return torch.Generator().manual_seed(state)


def _storage_error(path: Path, size: int, error: OSError) -> StorageError:
    if error.errno in FULL:
        return StorageError(
            f"{path}: the disk is full, {size / 2**20:.1f} MiB could not be written; nothing that was there is lost: "
            "make room and give the same command again"
        )
    return StorageError(f"{path}: cannot be written ({error.strerror}); choose another place with --out")
