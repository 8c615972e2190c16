"""Which files of a repository make the model that a name asks for.

A directory with a config.json and safetensors is one model. Otherwise each GGUF file is one, known by the quantisation
at the end of its name (`model-Q4_K_M.gguf`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.models.hub.names import HubName

TAG = re.compile(r"(?:^|[-._ ])((?:UD-)?(?:I?Q|TQ)\d[0-9A-Z_]*|B?F16|FP16|F32|MXFP4)$", re.IGNORECASE)  # ends a stem
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")  # one of several files of a model
# Small and nearly as good as the original first; then the next larger ones, then the rest by size.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "FP16")
BESIDE = re.compile(r"mmproj|imatrix|vocab|lora", re.IGNORECASE)  # GGUF files that are no model
CONFIG = "config.json"
WEIGHTS = re.compile(r"model[^/]*\.safetensors")
PARTS = re.compile(r"[^/]+\.(json|jinja)|tokenizer\.model")  # files beside the weights, but not in subdirectories


def tag_of(path: str) -> str:
    """The quantisation that a GGUF file's name ends with, in upper case; its stem if there is none."""
    stem = SPLIT.sub("", PurePosixPath(path).stem)
    found = TAG.search(stem)
    return stem if found is None else found[1].upper()


def is_split(path: str) -> bool:
    return SPLIT.search(PurePosixPath(path).stem) is not None


def is_gguf_model(path: str) -> bool:
    return path.endswith(".gguf") and BESIDE.search(PurePosixPath(path).name) is None


def choose(paths: Iterable[str], name: HubName) -> list[str]:
    """List the files of the model that `name` asks for. config.json comes last: where it is, everything is."""
    here = list(paths)
    files = [path for path in here if is_gguf_model(path)]
    is_directory = CONFIG in here and any(WEIGHTS.fullmatch(path) for path in here)
    if is_directory and name.quant is None:
        parts = [path for path in here if WEIGHTS.fullmatch(path) or PARTS.fullmatch(path)]
        return [*sorted(path for path in parts if path != CONFIG), CONFIG]
    if not files:
        raise _nothing(here, name)
    return [choose_gguf(files, name)]


def choose_gguf(paths: Sequence[str], name: HubName) -> str:
    """Choose the GGUF file that `name` asks for, or the preferred one."""
    if name.quant is not None:
        asked = name.quant.removesuffix(".gguf").lower()
        found = [path for path in paths if asked in (tag_of(path).lower(), PurePosixPath(path).stem.lower())]
    else:
        found = sorted((path for path in paths if not is_split(path)), key=_rank)[:1]
    whole = [path for path in found if not is_split(path)]
    if whole:
        return min(whole, key=len)
    if found or name.quant is None:
        raise UnsupportedModel(
            f"{name} is split into several files, which Paceline does not read; choose another "
            f"({_listed(paths)}), or join them with `llama-gguf-split --merge` and give the file"
        )
    near = difflib.get_close_matches(name.quant.upper(), [tag_of(path) for path in paths], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(paths)}"
    raise ModelNotFound(f"{name.id} has no file of the quantisation {name.quant!r}; {hint}")


def _rank(path: str) -> tuple[int, str]:
    tag = tag_of(path)
    return (PREFERRED.index(tag) if tag in PREFERRED else len(PREFERRED), path)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(sorted({tag_of(path) for path in paths if not is_split(path)})[:20]) or "no whole file"


def _nothing(paths: Sequence[str], name: HubName) -> ModelNotFound | UnsupportedModel:
    if "adapter_config.json" in paths:
        return UnsupportedModel(f"{name.id} is a LoRA adapter, which Paceline does not read; merge it into its model")
    if name.quant is not None and CONFIG in paths:
        return ModelNotFound(f"{name.id} has no GGUF files, so no quantisation {name.quant!r}; leave it out")
    if any(path.endswith((".bin", ".pt", ".pth")) for path in paths):
        return UnsupportedModel(f"{name.id} has its weights as pickles only, which can run code; look for a conversion")
    return ModelNotFound(f"{name.id} holds neither a GGUF file nor config.json with safetensors")
