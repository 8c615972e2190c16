"""Ranks of a split model as processes of Triton's interpreter, which meet in files that all of them map."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.kernels.cuda.exchange import PROGRAMS, Peers
from tests.kernels.cuda import conftest  # noqa: F401 - the interpreter as all tests of kernels have it

SECONDS = 60.0  # for a rank to answer
FEW_PROGRAMS = 3  # so that small tensors take several launches

Work = Callable[..., Any]


def peers_in(folder: Path, rank: int, ranks: int, hidden: int, *, programs: int = FEW_PROGRAMS) -> Peers:
    """Map the memory of all ranks. Files are made, and grow to their size, where they are missing."""
    _, _, most, width = Peers.shape(ranks, hidden)
    assert programs <= most <= PROGRAMS

    def mapped(name: str, owner: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        path = str(folder / f"{name}-{owner}")
        return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)

    return Peers(
        rank=rank,
        slots=tuple(mapped("slots", i, (2, ranks, programs, width), torch.float32) for i in range(ranks)),
        counts=tuple(mapped("counts", i, (ranks, programs), torch.int32) for i in range(ranks)),
        met=torch.zeros(programs, dtype=torch.int32),
        status=torch.zeros(2, dtype=torch.int32),
        seconds=SECONDS,
    )


def on_ranks(ranks: int, folder: Path, work: Work, *arguments: Any) -> list[Any]:
    """Return work(folder, rank, ranks, …) of every rank, each of which is a process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(ranks) as pool:
        calls = [pool.apply_async(work, (folder, rank, ranks, *arguments)) for rank in range(ranks)]
        return [call.get(SECONDS) for call in calls]
