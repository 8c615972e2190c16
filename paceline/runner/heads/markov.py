"""The heads of DSpark: a bias of the token before for each row of a block, and the drafter's own confidence.

e = before[token]          one row for each token of the target, of a small rank
vanilla   bias = after e
gated     bias = after (σ(gate [h; e]) · e)
rnn       g, c, o = joint [s; e; h];  s ← σ(g) · s + (1 - σ(g)) · tanh(c);  bias = after tanh(o);  s = 0 at first
confidence = σ(proj [h; e]), or σ(proj h): how likely the row's token is accepted, if all before it are
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.quant import Weight
from paceline.kernels.reference import embed, linear
from paceline.models.block_config import BlockConfig, MarkovKind


class Factors(Protocol):
    """The two matrices of a markov head, one row for each token."""

    def before(self, token: int) -> Tensor:
        """Return the factor float32 [1, rank] of the token before."""

    def biased(self, factor: Tensor, logits: Tensor) -> tuple[Tensor, int]:
        """Return logits float32 [1, draft vocabulary] with the bias of a factor, and the place of the best of them.
        They may have the memory of `logits`."""


class TorchFactors:
    """Implements Factors with floats."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights

    def before(self, token: int) -> Tensor:
        return embed(torch.tensor([token]), self._weights["markov.before"], torch.float32)

    def biased(self, factor: Tensor, logits: Tensor) -> tuple[Tensor, int]:
        logits = logits + linear(factor, self._weights["markov.after"]).float()
        return logits, int(logits.argmax())


def next_factor(
    kind: MarkovKind, memory: Tensor, embedded: Tensor, states: Tensor, product: Callable[[str, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute the input [rows, rank] of the bias, and the next memory of an rnn, from the rows' own `states` and the
    factors of the tokens before, `embedded`. `product`: of the matrix gate or joint with an input."""
    if kind == "vanilla":
        return embedded, memory
    if kind == "gated":
        return product("gate", torch.cat([states, embedded], dim=1)).sigmoid() * embedded, memory
    gate, candidate, out = product("joint", torch.cat([memory, embedded, states], dim=1)).chunk(3, dim=1)
    return out.tanh(), gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()


class MarkovRows:
    """Implements BlockRows for a drafter with one of these heads, or both."""

    def __init__(
        self,
        config: BlockConfig,
        weights: Mapping[str, Weight],
        factors: Factors | None,
        states: Tensor,
        logits: Tensor,
        best: Sequence[int],
    ) -> None:
        """`states` [rows, hidden] after the last norm, `logits` [rows, draft vocabulary] without the bias, and the
        `best` of each row. `weights`: of the gate, the rnn and the confidence. `factors`: None without a markov
        head."""
        self._config = config
        self._weights = weights
        self._factors = factors
        self._states = states
        self._logits = logits
        self._best = [*best]
        rank = 0 if config.markov is None else config.markov.rank
        self._memory = states.new_zeros(1, rank)

    def logits(self, row: int, before: int) -> Tensor:
        logits = self._logits[row : row + 1]
        if self._factors is not None:
            factor = self._factor(row, self._factors.before(before))
            logits, self._best[row] = self._factors.biased(factor, logits)
        return logits

    def best(self, row: int) -> int:
        return self._best[row]

    def confidence(self, row: int, before: int) -> float | None:
        if self._config.confidence is None:
            return None
        inputs = self._states[row : row + 1]
        if self._config.confidence == "states and tokens":
            assert self._factors is not None, "no markov head"
            inputs = torch.cat([inputs, self._factors.before(before)], dim=1)
        return float(self._product("confidence", inputs).float().sigmoid())

    def _factor(self, row: int, embedded: Tensor) -> Tensor:
        """Return the input [1, rank] of the bias. The rnn moves on: rows are asked for once, in order."""
        assert self._config.markov is not None, "no markov head"
        factor, self._memory = next_factor(
            self._config.markov.kind,
            self._memory,
            embedded,
            self._states[row : row + 1],
            lambda name, x: self._product(f"markov.{name}", x),
        )
        return factor

    def _product(self, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, Tensor), f"{name}.bias is quantised"
        return linear(x, self._weights[name], bias)
