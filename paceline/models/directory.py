"""Safe reading of a model's directory: no file outside of it, by name or by symlink, and no JSON of unlimited size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError

MAX_JSON = 1 << 26  # bytes of a JSON file; the index of a large model has a few hundred thousand


def member(directory: Path, name: str) -> Path:
    """Return the path of a file in the directory, or raise if it leads outside (but for the blobs of a hub cache)."""
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ModelFileError(f"{directory}: file name {name!r:.200} leads out of the directory")
    if not path.is_file():
        raise ModelFileError(f"{directory}: {name!r:.200} is missing")
    if not any(path.resolve().is_relative_to(root) for root in _roots(directory.resolve())):
        raise ModelFileError(f"{path}: a symlink that leads out of the directory; copy the file instead")
    return path


def _roots(directory: Path) -> list[Path]:
    """List the directories that a file may be in. The cache of the hub has links to its blobs:

    models--org--name/snapshots/revision/file → models--org--name/blobs/hash"""
    if directory.parent.name == "snapshots":
        return [directory, directory.parent.parent / "blobs"]
    return [directory]


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelFileError(f"{path}: more than {MAX_JSON} bytes of JSON")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds {type(value).__name__} where a JSON object is needed")
    return value
