"""The running sequences as a device sees them: one lane each, and everything that a round needs to know of it.

    tokens   [lanes + 1, width]   committed tokens, then the draft being verified
    lengths  [lanes + 1]          how many of them are committed
    pages    [lanes + 1, pages]   the page table

The host writes a lane when a sequence starts or when it has changed the lane itself; in between rounds move tokens and
lengths on without it. The last lane is a dummy of length 1 on the scratch page: seats that only pad a batch sit there.
"""

from __future__ import annotations

import torch

from paceline.kernels.base import PAGE_SIZE


class DeviceState:
    def __init__(self, *, lanes: int, width: int, scratch_page: int, device: torch.device | str) -> None:
        self.dummy = lanes
        self.device = torch.device(device)
        count, pages = lanes + 1, -(-width // PAGE_SIZE)
        self.tokens = torch.zeros((count, width), dtype=torch.int32, device=device)
        self.lengths = torch.ones(count, dtype=torch.int32, device=device)
        self.pages = torch.full((count, pages), scratch_page, dtype=torch.int32, device=device)
        # What is asked of sampling, as sampling.py means it.
        self.inverse_temperature = torch.zeros(count, dtype=torch.float32, device=device)  # 0: greedy
        self.top_k = torch.zeros(count, dtype=torch.int32, device=device)  # 0: off
        self.top_p = torch.ones(count, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(count, dtype=torch.float32, device=device)
        self.seed = torch.zeros(count, dtype=torch.int64, device=device)  # the bits of the unsigned seed
