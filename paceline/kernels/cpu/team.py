"""The threads that run kernels: how many, and the one team that all programs of a process share."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import Library

TOPOLOGY = "/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"


def default_threads() -> int:
    """Cores this process may run on; the hyperthreads of one core count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len({_core(cpu) for cpu in allowed}))


def _core(cpu: int) -> str:
    try:
        return Path(TOPOLOGY.format(cpu=cpu)).read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)


@cache
def team(library: Library, threads: int) -> int:
    """The handle of the team of `threads` threads; it lives as long as the process."""
    assert threads > 0, f"{threads} threads"
    handle = library.paceline_pool_new(threads)
    if not handle:
        raise OutOfMemory(f"no memory for a team of {threads} threads")
    return int(handle)


def pick(
    library: Library, threads: int, logits: Tensor, scales: Tensor, keys: Tensor, *, ids: Tensor | None = None
) -> Tensor:
    """argmax(logits [n, vocab] * scales [n] + gumbel(keys [n, 2])) as int64 [n]; the bits of `kernels.noise.pick`."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row are adjacent"
    tokens = torch.empty(rows, dtype=torch.int32)
    pointers = torch.arange(rows) * (logits.stride(0) * 4) + logits.data_ptr()  # int64 [rows]
    narrow = keys.to(torch.int32).contiguous()  # the low 32 bits
    heat = scales.to(torch.float32).contiguous()
    places = None if ids is None else ids.data_ptr()
    arguments = (pointers.data_ptr(), heat.data_ptr(), narrow.data_ptr(), places, rows, vocab, tokens.data_ptr())
    if library.paceline_pick(team(library, threads), *arguments):
        raise OutOfMemory(f"no memory to sample {rows} rows")
    return tokens.to(torch.int64)
