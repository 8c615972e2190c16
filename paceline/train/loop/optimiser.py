"""How weights follow their gradients: Muon for the matrices between two norms, AdamW for vectors and the vocabulary.

Muon makes every direction of a matrix' update equally long. Its updates are scaled to the size of Adam's, so that one
learning rate serves both; it wants a larger one than Adam alone (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
MOMENTUM = 0.95
TALL = 8  # rows by columns beyond which a matrix is a vocabulary: rows are tokens, most of which a batch does not touch
MEMORY = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")


class Optimiser:
    def __init__(self, params: Mapping[str, Tensor], *, learning_rate: float) -> None:
        self._params = dict(params)
        self._learning_rate = learning_rate
        matrices = [p for p in params.values() if p.dim() == 2 and len(p) <= TALL * p.shape[1]]
        others = [p for p in params.values() if not any(p is matrix for matrix in matrices)]
        fused = others[0].device.type == "cuda" if others else False
        self._parts: list[torch.optim.Optimizer] = []
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=fused))
        if matrices:
            muon = torch.optim.Muon(matrices, weight_decay=0.0, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)

    def step(self, rate: float) -> None:
        """At this share of the learning rate; gradients are gone afterwards."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._learning_rate * rate
            part.step()
            part.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, Tensor]:
        """By `WHAT.NAME`."""
        return {
            f"{what}.{name}": part.state[param][what]
            for part in self._parts
            for name, param in self._params.items()
            for what in MEMORY
            if what in part.state.get(param, {})
        }

    def recall(self, memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """What `memory` gave, by WHAT and then by NAME."""
        for part in self._parts:
            mine = [param for group in part.param_groups for param in group["params"]]
            for name, param in self._params.items():
                if any(param is own for own in mine):
                    found = {what: memory[what][name] for what in MEMORY if name in memory.get(what, {})}
                    part.state[param] = {what: tensor.to(param.device) for what, tensor in found.items()}
