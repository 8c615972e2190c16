"""Batches of one sequence, for tests of forwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kernels.base import PAGE_SIZE, Batch


def chunks_of(tokens: Sequence[int], sizes: Sequence[int], *, pages: Sequence[int] = (5, 2, 7, 1)) -> list[Batch]:
    """One sequence as passes of the given sizes, its pages scattered, logits wanted for every row."""
    batches, start = [], 0
    for size in sizes:
        rows = torch.arange(start, start + size)
        slots = torch.tensor(pages)[rows // PAGE_SIZE] * PAGE_SIZE + rows % PAGE_SIZE
        batches.append(
            Batch(
                tokens=torch.tensor(tokens[start : start + size], dtype=torch.int32),
                positions=rows.int(),
                slots=slots.int(),
                row_starts=torch.tensor([0, size], dtype=torch.int32),
                bases=torch.tensor([start + size], dtype=torch.int32),
                page_table=torch.tensor([pages], dtype=torch.int32),
                logit_rows=torch.arange(size, dtype=torch.int32),
            )
        )
        start += size
    return batches
