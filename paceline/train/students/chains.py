"""What students that draft token by token share: a layer unrolled over its own outputs, and the losses and guesses of
its steps.

`train.students.eagle` says what the rows and steps of a chain are. Weights have their names in the file; a layer finds
its own by their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import RopeScaling
from paceline.models.rope import rope_frequencies, turns
from paceline.train.data.batches import LENGTH_MULTIPLE, TextBatch
from paceline.train.fused import attention_weights, gated, norm, rotate
from paceline.train.students.labels import Labels, soft_loss
from paceline.train.students.student import Losses, best_tokens

OWN_COLUMNS = LENGTH_MULTIPLE // 2  # attention columns for keys of the chain itself; they keep rows aligned
STEP_DECAY = 0.8  # weight of a step in the loss, relative to the step before: about the share of chains that reach it


class LayerShape(Protocol):
    """What a layer needs to know of a head's shape."""

    @property
    def head_dim(self) -> int: ...

    @property
    def eps(self) -> float: ...

    @property
    def theta(self) -> float: ...

    @property
    def scaling(self) -> RopeScaling | None: ...


@dataclass(slots=True)
class Chain:
    """Keys and values of the steps so far, [sequences, length, kv_heads, head_dim] each."""

    angles: tuple[Tensor, Tensor]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One decoder layer, whose weights have names that begin with `prefix`."""

    prefix: str
    head_dim: int
    eps: float
    frequencies: Tensor

    @classmethod
    def of(cls, shape: LayerShape, prefix: str, device: torch.device) -> ChainLayer:
        frequencies = rope_frequencies(shape.head_dim, shape.theta, shape.scaling).to(device)
        return cls(prefix, shape.head_dim, shape.eps, frequencies)

    def begin(self, texts: TextBatch) -> Chain:
        """Begin the chains of texts, one at each row."""
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device).repeat(len(texts.ids))
        return Chain(turns(positions, self.frequencies))

    def __call__(self, x: Tensor, inputs: Tensor, weights: Mapping[str, Tensor], chain: Chain) -> Tensor:
        """Compute the output [sequences, length, hidden] of the next step. Attention reads `inputs`; x is the residual
        stream."""
        q, k, v = (self._project(inputs, weights, name, chain.angles) for name in "qkv")
        chain.keys.append(k)
        chain.values.append(v)
        mixed = attend(q, chain.keys, chain.values).flatten(-2)
        x = x + functional.linear(mixed, weights[f"{self.prefix}self_attn.o_proj.weight"])
        return x + self._mlp(self.norm(x, weights[f"{self.prefix}post_attention_layernorm.weight"]), weights)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]), weight, self.eps).view(x.shape)

    def _project(self, x: Tensor, weights: Mapping[str, Tensor], name: str, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Project x to [sequences, length, heads, head_dim]; rotate queries and keys."""
        out = functional.linear(x, weights[f"{self.prefix}self_attn.{name}_proj.weight"])
        out = out.view(*x.shape[:2], -1, self.head_dim)
        return out if name == "v" else rotate(out.flatten(0, 1), *angles).view(out.shape)

    def _mlp(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        gate, up, down = (weights[f"{self.prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return functional.linear(gated(functional.linear(x, gate), functional.linear(x, up)), down)


def chain_losses(
    outputs: Iterable[Tensor], logits: Callable[[Tensor], Tensor], labels: Labels, texts: TextBatch, rows: Tensor
) -> Losses:
    """Compute the losses of all steps, from the outputs [sequences, length, hidden] of each. `labels` are those of
    `rows`; a row counts at a step if a chain of so many steps can end there."""
    first = (texts.starts - 1)[rows // texts.ids.shape[1]]  # first row of the answer
    depth = rows % texts.ids.shape[1] - first  # steps of the longest chain that ends at the row
    total, by_step, agreement = torch.zeros((), device=rows.device), [], []
    for step, y in enumerate(outputs):
        counts = (depth >= step).float()
        counts /= counts.sum().clamp_min(1.0)
        loss, distance, best = soft_loss(logits(y.flatten(0, 1).index_select(0, rows)), labels, counts)
        total = total + loss * STEP_DECAY**step
        by_step.append(distance)
        agreement.append(((best == labels.best) * counts).sum())
    return Losses(total=total, by_step=torch.stack(by_step), agreement=torch.stack(agreement))


def chain_guesses(
    outputs: Iterable[Tensor], logits: Callable[[Tensor], Tensor], texts: TextBatch, *, ids: Tensor | None = None
) -> Tensor:
    """Return the best token of each step, at the first row of its chain. `ids`: tokens of a draft vocabulary."""
    found = []
    for step, y in enumerate(outputs):
        best = best_tokens(y.flatten(0, 1), logits)
        drafted = (best if ids is None else ids[best]).view(texts.ids.shape)
        found.append(drafted.roll(-step, dims=1))  # from the row of the guess to the first row of its chain
    return torch.stack(found, dim=-1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Compute attention of the newest step; all tensors are [sequences, length, heads, head_dim].

    weights   [.., length, length + OWN_COLUMNS]   keys of step 0, then keys of the row's own chain, oldest first
    """
    step, (sequences, length, kv_heads, dim) = len(keys) - 1, keys[0].shape
    q = (q * dim**-0.5).view(sequences, length, kv_heads, -1, dim)
    q = q.permute(0, 2, 3, 1, 4)  # [sequences, kv_heads, group, length, dim]
    flat = (sequences, kv_heads, q.shape[2] * length, -1)
    firsts = (q.reshape(flat) @ keys[0].permute(0, 2, 3, 1)).view(*q.shape[:-1], length)
    chain = [shifted(keys[i], step - i).transpose(1, 2)[:, :, None] for i in range(1, step + 1)]
    own = [(q * key).sum(dim=-1) for key in chain]
    own += [torch.zeros_like(firsts[..., 0])] * (OWN_COLUMNS - step)
    weights = attention_weights(firsts, torch.stack(own, dim=-1), _mask(length, step, like=firsts))
    on_firsts, on_own = torch.split(weights, [length, OWN_COLUMNS], dim=-1)  # one gradient; slices have one each
    out = (on_firsts.reshape(flat) @ values[0].transpose(1, 2)).view(q.shape)
    for i in range(1, step + 1):
        value = shifted(values[i], step - i).transpose(1, 2)[:, :, None]
        out = out + on_own[..., i - 1, None] * value
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def shifted(x: Tensor, rows: int) -> Tensor:
    """Move the rows of x [sequences, length, ...] by `rows` towards the end; the first ones become zero."""
    if not rows:
        return x
    return torch.cat([torch.zeros_like(x[:, :rows]), x[:, :-rows]], dim=1)


def _mask(length: int, step: int, *, like: Tensor) -> Tensor:
    """Return a mask [length, length + OWN_COLUMNS]: 0 where a row of this step may attend, else minus infinity."""
    at = torch.arange(length, device=like.device)
    firsts = at[:, None] - step >= at
    own = (torch.arange(OWN_COLUMNS, device=like.device) < step).expand(length, OWN_COLUMNS)
    allowed = torch.cat([firsts, own], dim=1)
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)
