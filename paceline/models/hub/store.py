"""The models that are here: those that Paceline fetched, and those in the cache of huggingface_hub.

    <cache home>/models/org/name/file.gguf        each GGUF file is a model
    <cache home>/models/org/name/config.json …    written last, so where it is, everything is
    …/file.gguf.0123456789ab.part                 the beginning of a file whose digest begins so

The cache of huggingface_hub is read, and never changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.cache_home import cache_home
from paceline.errors import ModelNotFound
from paceline.models.hub.choice import choose_gguf, is_gguf_model, tag_of
from paceline.models.hub.names import HubName, hub_name


@dataclass(frozen=True, slots=True)
class Stored:
    """A model on this disk."""

    name: str  # how commands call it
    bytes: int
    format: str
    path: Path
    owner: str  # the program whose cache it is in


def models_folder() -> Path:
    return cache_home() / "models"


def place_of(id: str) -> Path:
    return models_folder() / id


def hugging_face_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def find(name: HubName) -> Path | None:
    """Find the GGUF file or the directory of a model that is here and whole."""
    for folder in (place_of(name.id), _snapshot(name.id)):
        found = None if folder is None else _find_in(folder, name)
        if found is not None:
            return found
    return None


def stored() -> list[Stored]:
    """List the models that are here, by name."""
    own = {f"{folder.parent.name}/{folder.name}": folder for folder in sorted(models_folder().glob("*/*"))}
    return [
        *(model for id, folder in own.items() for model in _models_in(folder, id, owner="paceline")),
        *(model for id, folder in _snapshots() for model in _models_in(folder, id, owner="huggingface_hub")),
    ]


def remove(name: str) -> int:
    """Remove a model that Paceline fetched, with its unfinished parts, and return the bytes that this frees."""
    asked = hub_name(name)
    folder = None if asked is None else place_of(asked.id)
    if asked is None or folder is None or not folder.is_dir():
        raise ModelNotFound(f"{name!r:.200} was not fetched by `paceline pull`: only such models are removed")
    if asked.quant is None:
        freed = _size(folder)
        shutil.rmtree(folder)
    else:
        chosen = folder / choose_gguf(_gguf_files(folder), asked)
        freed = chosen.stat().st_size
        chosen.unlink()
    for empty in (folder, folder.parent):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
    return freed


def _find_in(folder: Path, name: HubName) -> Path | None:
    if name.quant is None and (folder / "config.json").is_file():
        return folder
    files = _gguf_files(folder)
    try:
        return folder / choose_gguf(files, name) if files else None
    except ModelNotFound:  # other quantisations are here
        return None


def _gguf_files(folder: Path) -> list[str]:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    return sorted(path for path in paths if is_gguf_model(path))


def _models_in(folder: Path, id: str, *, owner: str) -> Iterator[Stored]:
    for file in _gguf_files(folder):
        path = folder / file
        yield Stored(f"{id}:{tag_of(file)}", path.stat().st_size, f"GGUF {tag_of(file)}", path, owner)
    if (folder / "config.json").is_file():
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        yield Stored(id, size, "safetensors", folder, owner)
    parts = [path for path in folder.rglob("*.part") if path.is_file()]
    if parts:
        yield Stored(id, sum(path.stat().st_size for path in parts), "unfinished: pull it again", folder, owner)


def _snapshots() -> Iterator[tuple[str, Path]]:
    """Yield the ids and folders of all models in the cache of huggingface_hub."""
    for folder in sorted(_hub_cache().glob("models--*--*")):
        id = folder.name.removeprefix("models--").replace("--", "/", 1)
        path = _snapshot(id)
        if path is not None:
            yield id, path


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or hugging_face_home() / "hub").expanduser()


def _snapshot(id: str) -> Path | None:
    """The snapshot of a repository's main branch in the cache of huggingface_hub."""
    folder = _hub_cache() / f"models--{id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    path = folder / "snapshots" / commit
    return path if commit.isalnum() and path.is_dir() else None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
