"""Memory: bytes of weights by format as they will run, what is free, and an error that names what did not fit.

`packed`: kernels read quantised weights as they are; otherwise the weights are dequantised to float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.cgroups import memory_left
from paceline.kernels.cpu.topology import ROOT
from paceline.kernels.quant import GROUP, Float8, Quantised, values_of
from paceline.models.load import LoadedModel
from paceline.models.weights import Weight, weight_bytes


@dataclass(frozen=True, slots=True)
class WeightPart:
    """All weights of one format."""

    format: str
    tensors: int
    parameters: int
    bytes: int  # in memory, as they run


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Turn torch's out-of-memory error of a CUDA device into one that says what did not fit and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise OutOfMemory(
            f"no memory for {what}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free on the device; {advice}"
        ) from error


def pass_bytes(model: LoadedModel, *, packed: bool) -> int:
    """Count the bytes of weights that a forward pass reads.

    An embedding counts only if it is also the head: otherwise a pass reads a few of its rows."""
    read = [weight for name, weight in model.weights.items() if name != "embed" or model.config.tied_head]
    return sum(_bytes_in_use(weight, packed=packed) for weight in read)


def weight_parts(model: LoadedModel, *, packed: bool) -> list[WeightPart]:
    """Sum up the weights by format, those with the most bytes first."""
    by_format: dict[str, list[Weight]] = {}
    for weight in model.weights.values():
        by_format.setdefault(_format_in_use(weight, packed=packed), []).append(weight)
    parts = [
        WeightPart(
            format=format,
            tensors=len(weights),
            parameters=sum(values_of(weight).numel() for weight in weights),
            bytes=sum(_bytes_in_use(weight, packed=packed) for weight in weights),
        )
        for format, weights in by_format.items()
    ]
    return sorted(parts, key=lambda part: -part.bytes)


def _format_in_use(weight: Weight, *, packed: bool) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype).removeprefix("torch.")
    kind = "8-bit float" if isinstance(weight, Float8) else f"{weight.bits}-bit"
    grouped = isinstance(weight, Quantised) and weight.grouped
    name = f"{kind}, groups of {GROUP}" if grouped else f"{kind}, by channel"
    return name if packed else f"{name}, as float32"


def _bytes_in_use(weight: Weight, *, packed: bool) -> int:
    if isinstance(weight, Tensor) or packed:
        return weight_bytes(weight)
    return 4 * weight.q.numel()  # float32


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process can use without swapping, within the limits of its container."""
    free, left = _free(root), memory_left(root)
    return free if left is None else min(free, left)


def _free(root: Path) -> int:
    """Return the bytes of the machine's memory that can be used without swapping."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    except (OSError, StopIteration):  # not Linux: half of the installed memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
