"""Fetch a model from the hub into the cache home."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ModelNotFound, StorageError
from paceline.models.hub.choice import choose
from paceline.models.hub.client import Hub, RemoteFile
from paceline.models.hub.names import HubName
from paceline.models.hub.store import models_folder, place_of
from paceline.sizes import format_size

Progress = Callable[[int, int], None]  # bytes here, bytes in all


def pull(name: HubName, progress: Progress | None = None) -> list[RemoteFile]:
    """Fetch the files of a model that are not here yet, or differ. Return all of its files."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise ModelNotFound(f"{name} is not here, and HF_HUB_OFFLINE forbids to fetch it; `paceline list` shows models")
    hub = Hub()
    remote = hub.files(name.id)
    files = [remote[path] for path in choose(remote, name)]
    folder, total = place_of(name.id), sum(file.size for file in files)
    missing = [file for file in files if not file.is_at(folder / file.path)]
    _check_space(sum(file.size - _size(file.part_of(folder / file.path)) for file in missing))
    done = total - sum(file.size for file in missing)
    for file in missing:
        hub.fetch(file, folder / file.path, _tick(progress, done, total))
        done += file.size
    return files


def _tick(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return lambda here: None if progress is None else progress(done + here, total)


def _check_space(needed: int) -> None:
    place = models_folder()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise StorageError(
            f"{format_size(needed)} do not fit on the disk of {models_folder()}, which has {format_size(free)} left; "
            "remove a model (`paceline rm`), or set PACELINE_CACHE to a place on another disk"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
