"""Memory that each rank will hold, counted before weights are read; too much for the machine is an error.

Drafters and their KV memory are on rank 0, but for those that are split as the target is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a rank will hold."""

    target: int  # weights and KV memory
    drafters: int = 0

    @property
    def bytes(self) -> int:
        return self.target + self.drafters


def bytes_of_ranks(described: Mapping[str, Weight], config: ModelConfig, split: Split, *, kv_bytes: int) -> list[int]:
    """Count the bytes of a model that each rank will hold. `described`: all weights, as they will be read; `kv_bytes`:
    of the KV memory of all ranks."""
    return [_weight_bytes(described, config, split, rank) + kv_bytes // split.degree for rank in range(split.degree)]


def check_memory(free: Sequence[int], needs: Sequence[Need]) -> None:
    """Raise OutOfMemory if a rank does not fit beside the others. `free`: bytes that each finds on the machine, before
    any has read weights."""
    total = sum(need.bytes for need in needs)
    lacking = [rank for rank, found in enumerate(free) if found < total]
    if not lacking:
        return
    rank = max(lacking, key=lambda rank: (needs[rank].bytes - free[rank], -rank))
    need = needs[rank]
    drafters = f", {_spelt(need.drafters)} of them for drafters," if need.drafters else ""
    others = f" beside {_spelt(total - need.bytes)} of the other ranks" if len(needs) > 1 else ""
    raise OutOfMemory(
        f"rank {rank} needs {_spelt(need.bytes)} for weights and KV cache{drafters}{others}, and {_spelt(free[rank])} "
        "are free: lower kv_memory or max_context, or take a smaller format"
    )


def _weight_bytes(described: Mapping[str, Weight], config: ModelConfig, split: Split, rank: int) -> int:
    if split.packed:
        return layout_of_rank(described, config, split, rank=rank).size
    shapes = [expected_shapes(shard_config(config, shard, split)) for shard in split.of_rank(rank)]
    return sum(prod(shape) * _number_bytes(described[name]) for each in shapes for name, shape in each.items())


def _number_bytes(weight: Weight) -> int:
    return weight.dtype.itemsize if isinstance(weight, Tensor) and weight.dtype != torch.float8_e4m3fn else FLOAT_BYTES


def _spelt(size: int) -> str:
    return f"{size / 2**20:.0f} MiB ({size} bytes)"
