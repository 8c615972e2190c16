"""Memory that each rank will hold, counted before weights are read; too much for the machine is an error.

Rank 0 holds more than the others: the drafters and their KV memory are in its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import expected_shapes
from paceline.models.weights import Weight
from paceline.runner.parallel.compiled_part import layout_of_rank
from paceline.runner.parallel.split import Split, shard_config

FLOAT_BYTES = 4  # of a number that torch computes with after it was stored otherwise


def bytes_of_ranks(
    described: Mapping[str, Weight], config: ModelConfig, split: Split, *, kv_bytes: int, beside: int
) -> list[int]:
    """Count the bytes that each rank will hold. `described`: all weights, as they will be read; `kv_bytes`: bytes of KV
    memory on all ranks together; `beside`: bytes of drafters."""
    weights = [_weight_bytes(described, config, split, rank) for rank in range(split.degree)]
    needs = [each + kv_bytes // split.degree for each in weights]
    return [needs[0] + beside, *needs[1:]]


def check_memory(free: Sequence[int], needs: Sequence[int]) -> None:
    """Raise OutOfMemory if a rank does not fit beside the others. `free`: bytes that each finds on the machine, before
    any has read weights; `needs`: bytes that each will hold."""
    lacking = [rank for rank, found in enumerate(free) if found < sum(needs)]
    if not lacking:
        return
    rank = max(lacking, key=lambda rank: (needs[rank] - free[rank], -rank))
    others = f" beside {_spelt(sum(needs) - needs[rank])} of the other ranks" if len(needs) > 1 else ""
    held = "weights, KV cache and drafters" if rank == 0 else "weights and KV cache"
    raise OutOfMemory(
        f"rank {rank} needs {_spelt(needs[rank])} for {held}{others}, and {_spelt(free[rank])} are free: lower "
        "kv_memory or max_context, or take a smaller format"
    )


def _weight_bytes(described: Mapping[str, Weight], config: ModelConfig, split: Split, rank: int) -> int:
    if split.compiled:
        return layout_of_rank(described, config, split, rank=rank).size
    shapes = [expected_shapes(shard_config(config, shard, split)) for shard in split.of_rank(rank)]
    return sum(prod(shape) * _number_bytes(described[name]) for each in shapes for name, shape in each.items())


def _number_bytes(weight: Weight) -> int:
    return weight.dtype.itemsize if isinstance(weight, Tensor) and weight.dtype != torch.float8_e4m3fn else FLOAT_BYTES


def _spelt(size: int) -> str:
    return f"{size / 2**20:.0f} MiB ({size} bytes)"
