"""The optimiser: Muon for the matrices between two norms, AdamW for vectors and matrices over the vocabulary.

Muon gives every direction of a matrix's update the same length. Its updates are scaled to the size of Adam's, so that
one learning rate serves both; it needs a larger one than Adam alone (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
VOCABULARY_ASPECT = 8  # rows / columns; a larger ratio means one row per token, and a batch touches few tokens
STATE_TENSORS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")  # per parameter, as torch names them


class Optimiser:
    def __init__(self, params: Mapping[str, Tensor], *, learning_rate: float) -> None:
        self._params = dict(params)
        self._learning_rate = learning_rate
        matrices = [p for p in params.values() if p.dim() == 2 and len(p) <= VOCABULARY_ASPECT * p.shape[1]]
        others = [p for p in params.values() if not any(p is matrix for matrix in matrices)]
        fused = others[0].device.type == "cuda" if others else False
        self._parts: list[torch.optim.Optimizer] = []
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=ADAM_BETAS, weight_decay=0.0, fused=fused))
        if matrices:
            muon = torch.optim.Muon(matrices, weight_decay=0.0, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)

    def step(self, rate: float) -> None:
        """Update the parameters with `rate` times the learning rate, and clear the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._learning_rate * rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors for a checkpoint; a name is that of the state tensor, a dot, and the parameter's."""
        return {
            f"{what}.{name}": part.state[param][what]
            for part in self._parts
            for name, param in self._params.items()
            for what in STATE_TENSORS
            if what in part.state.get(param, {})
        }

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the result of `state`, here as a dictionary by state tensor, then by parameter."""
        for part in self._parts:
            mine = [param for group in part.param_groups for param in group["params"]]
            for name, param in self._params.items():
                if any(param is own for own in mine):
                    found = {what: state[what][name] for what in STATE_TENSORS if name in state.get(what, {})}
                    part.state[param] = {what: tensor.to(param.device) for what, tensor in found.items()}
