"""Data-parallel training by several processes, as `torchrun` starts them: own batches, one averaged gradient.

In a single process all of this has no effect. Decisions (how much time has passed, whether to stop) are made by the
first process and broadcast to the others, so that all take the same number of steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train one drafter, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> World:
        """Join the processes that the environment names; `device` is cpu or cuda."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = torch.device(device, int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else torch.device("cpu")
        if local.type == "cuda":
            torch.cuda.set_device(local)
        if size > 1:
            distributed.init_process_group("nccl" if local.type == "cuda" else "gloo")
        return cls(rank=rank, size=size, device=local)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average tensors over all processes, in place."""
        if self.size == 1:
            return
        every = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in every])
        distributed.all_reduce(flat)
        flat /= self.size
        done = 0
        for tensor in every:
            tensor.copy_(flat[done : done + tensor.numel()].view_as(tensor))
            done += tensor.numel()

    def broadcast(self, value: float) -> float:
        """Return the first process' value in all of them."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(box, src=0)
        return float(box)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            distributed.barrier()

    def leave(self) -> None:
        if self.size > 1:
            distributed.destroy_process_group()
