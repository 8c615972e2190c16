"""What DFlash2 has beside a block drafter's layers, on a CUDA device: convolutions, and a choice among the best tokens.

`runner.heads.convolution` and `runner.heads.selector` have the formulas. Both are operations of torch, which graphs
record; their products are those of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.norm import embed
from paceline.models.block_config import Convolutions
from paceline.runner.forwards.cuda_layers import Packer
from paceline.runner.heads.convolution import around
from paceline.runner.heads.selector import BEHIND

Products = Callable[[Tensor, CudaMatrix], Tensor]  # (inputs, matrix) → outputs, in memory that is reused


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution around attention or the MLP of a layer."""

    config: Convolutions
    base: Tensor  # float32 [2 * taps, hidden]
    kernel: CudaMatrix

    def around(self, x: Tensor, rows: int, product: Products) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Convolve inputs [blocks * rows, hidden]; return them, and a function for the outputs."""
        return around(x, self.base, product(x, self.kernel).clone(), self.config, rows=rows)


def convolutions(packer: Packer, config: Convolutions, layers: int) -> list[tuple[Convolution, Convolution]]:
    """Pack the convolutions of all layers, each around attention and around the MLP."""

    def one(index: int, name: str) -> Convolution:
        of = f"layers.{index}.{name}"
        return Convolution(config, packer.vector(f"{of}.base"), packer.matrix(f"{of}.kernel"))

    return [(one(index, "attn_conv"), one(index, "mlp_conv")) for index in range(layers)]


class CudaSelector:
    """The choice of each seat's token among the best of its row, by the token before."""

    def __init__(self, packer: Packer, top: int, *, ids: Tensor) -> None:
        """`ids`: the target's token of each output."""
        self._before, self._after = packer.matrix("selector.before"), packer.matrix("selector.after")
        self._states = packer.matrix("selector.states")
        self._top, self._ids = top, ids

    def matrices(self) -> list[CudaMatrix]:
        return [self._states]

    def chosen(self, logits: Tensor, states: Tensor, before: Tensor, product: Products) -> Tensor:
        """Return logits [seats, draft vocabulary] in which the best of each row have their scores, and lead."""
        best, places = logits.topk(self._top, dim=-1)
        factors = product(states, self._states)  # [seats, rank]
        left, right = factors.new_empty(factors.shape), factors.new_empty((places.numel(), factors.shape[1]))
        embed(before, self._before, left)
        embed(self._ids[places.flatten()], self._after, right)
        pairs = right.view(len(logits), self._top, -1).float() * (left * factors).float()[:, None]
        return (logits - BEHIND).scatter_(1, places, best + pairs.sum(-1))
