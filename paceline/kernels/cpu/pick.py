"""Sampling by the C kernels (pick.c): the same tokens, to the bit, as `paceline.kernels.noise.pick`."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.pool import thread_pool


def pick(
    library: Library,
    threads: int,
    logits: Tensor,
    inverse_temperatures: Tensor,
    keys: Tensor,
    *,
    ids: Tensor | None = None,
) -> Tensor:
    """Draw argmax(logits [n, vocab] * inverse_temperatures [n] + gumbel(keys [n, 2])) as int64 [n].

    `ids` int32 [vocab]: the target's token of each output, which keys the noise; None: outputs are tokens."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row are adjacent"
    tokens = torch.empty(rows, dtype=torch.int32)
    pointers = torch.arange(rows) * (logits.stride(0) * 4) + logits.data_ptr()  # int64 [rows]
    scales = inverse_temperatures.to(torch.float32).contiguous()
    low_keys = keys.to(torch.int32).contiguous()  # the low 32 bits
    places = None if ids is None else ids.data_ptr()
    arguments = (pointers.data_ptr(), scales.data_ptr(), low_keys.data_ptr(), places, rows, vocab, tokens.data_ptr())
    if library.paceline_pick(thread_pool(library, threads), *arguments):
        raise OutOfMemory(f"no memory to sample {rows} rows")
    return tokens.to(torch.int64)
