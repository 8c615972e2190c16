"""Packs of models from the cache, or into it.

A pack's name is a hash of everything that its bytes depend on: the digest of the model's files, the config, the format,
the variant of the kernels, the layout, and the sources that pack. So an entry is never wrong, only unused.

Where nothing can be written, weights are packed into memory, as with a cache of size 0; a warning says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack
from paceline.kernels.cpu.pack_file import read_pack, write_pack
from paceline.kernels.cpu.pack_header import DamagedPack, sweep
from paceline.models.digest import file_state, files_digest
from paceline.runner.loading.pack_store import SIZE_VARIABLE, cache_limit, entries, make_room, pack_folder
from paceline.runner.loading.stages import stage
from paceline.sizes import format_size

logger = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[2]
PACKERS = (  # sources that decide on the bytes of a pack
    "kernels/cpu/abi.h",
    "kernels/cpu/checksum.c",
    "kernels/cpu/pack.c",
    "kernels/cpu/pack.py",
    "kernels/cpu/quantise.c",
    "kernels/cpu/stored.c",
    "kernels/quant.py",
    "models/gguf_blocks.py",
    "models/head_tensors.py",
    "models/heads.py",
    "models/tensor_names.py",
    "models/weights.py",
    "runner/forwards/decoder_pack.py",
    "runner/heads/head_pack.py",
    "runner/heads/sketch.py",
    "runner/loading/shortlist.py",
    "prompts/sets/code_edit/code_edit.jsonl.gz",
    "prompts/sets/spec_bench/question.jsonl.gz",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of a pack, and everything else that decides on its bytes."""

    model: str  # name for people
    files: tuple[Path, ...]
    format: str
    config: object  # its repr tells configs apart


def cached(layout: Layout, origin: Origin, fill: Callable[[Pack], None], *, threads: int | None = None) -> Pack:
    """Return the pack of a model: read from the cache, or filled and kept there."""
    path = _path(layout, origin)
    if path is not None and (found := _found(path, layout, origin, threads)):
        return found
    states, pack = [file_state(file) for file in origin.files], Pack(layout, threads=threads)
    with stage(f"pack {origin.model}"):
        fill(pack)
    if path is not None and states == [file_state(file) for file in origin.files]:
        _keep(path, pack, origin)
    return pack


def _found(path: Path, layout: Layout, origin: Origin, threads: int | None) -> Pack | None:
    try:
        with stage(f"read and check the packed weights of {origin.model}"):
            pack = read_pack(path, layout, threads=threads)
    except FileNotFoundError:
        return None
    except (DamagedPack, OSError) as error:
        logger.warning("%s is not used (%s): packing %s again", path, error, origin.model)
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):
        os.utime(path)  # the time of the last use
    return pack


def _keep(path: Path, pack: Pack, origin: Origin) -> None:
    """Write a pack into the cache if there is room and permission."""
    facts = {"model": origin.model, "format": origin.format, "variant": _variant()}
    try:
        sweep(path.parent)
        make_room(pack.layout.size)
        with stage(f"write the packed weights of {origin.model}"):
            write_pack(path, pack, facts)
    except OSError as error:
        logger.warning("the packed weights of %s are not cached: %s", origin.model, error.strerror or error)


def _path(layout: Layout, origin: Origin) -> Path | None:
    """Return the file of a pack, which may not exist; None: there is no cache."""
    limit, folder = cache_limit(), pack_folder()
    if not limit:
        return None
    if layout.size > limit:
        logger.warning(
            "the packed weights of %s are not cached: %s are more than %s allows (%s)",
            origin.model,
            format_size(layout.size),
            SIZE_VARIABLE,
            format_size(limit),
        )
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) and not entries():
        logger.warning("the packed weights of %s are not cached: %s cannot be written", origin.model, folder)
        return None
    with stage(f"digest of {origin.model}"):
        return folder / f"{_key(layout, origin)}.pack"


def _key(layout: Layout, origin: Origin) -> str:
    facts = files_digest(origin.files), origin.config, origin.format, _variant(), layout.items, packer_version()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _variant() -> str:
    return load_library().variant


@cache
def packer_version() -> str:
    """Hash the sources that decide on the bytes of a pack."""
    digest = hashlib.sha256()
    for name in PACKERS:
        digest.update((PACKAGE / name).read_bytes())
    return digest.hexdigest()
