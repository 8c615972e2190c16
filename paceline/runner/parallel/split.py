"""How a model is split: which heads, MLP columns and tokens belong to each shard, and which shards to each rank.

    shards   0 1 2 3 4 5 6 7       always as many as `Split.shards`
    ranks    0 0 │ 1 1 │ 2 2 │ 3 3      degree 4

A rank computes its shards one after the other, each by calls of the same shapes, and adds their partial sums in a tree.
Usually a rank has one shard. For the same bits across degrees a model has the same shards at every degree.

Nothing here reads weights or talks to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from paceline.errors import InvalidRequest
from paceline.kernels.kv_tensors import page_bytes
from paceline.kernels.quant import GROUP
from paceline.models.config import ModelConfig

LEAVES = 8  # shards of a model whose bits are the same across degrees, where its heads allow; a power of two
OUTPUTS = ("q", "k", "v", "gate", "up", "embed", "head")  # split by rows: each shard computes some outputs
INPUTS = ("o", "down")  # split by columns: each shard adds a part to all outputs

Axis = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Split:
    """A model over `degree` ranks, in `shards` shards; a multiple of the degree."""

    degree: int
    shards: int
    same_bits: bool = False  # the shards are those of every other degree, too
    packed: bool = False  # for compiled programs and GPUs: inputs are cut between groups, a rank's heads are one piece

    def of_rank(self, rank: int) -> range:
        """Return the shards of a rank."""
        each = self.shards // self.degree
        return range(rank * each, (rank + 1) * each)

    @property
    def by_ranks(self) -> Split:
        """Return the split in which each rank has one shard."""
        return replace(self, shards=self.degree)

    @property
    def group(self) -> int:
        """Return the number of inputs that are cut together."""
        return GROUP if self.packed else 1

    def page_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Count the bytes of one page of KV memory on all ranks together; heads that several shards have count anew."""
        split = self.by_ranks if self.packed else self
        heads = split.shards * shard_config(config, 0, split).num_kv_heads
        return page_bytes(config.num_layers, heads, config.head_dim, dtype)

    @property
    def spoken(self) -> str:
        """Say it for users."""
        ranks = f"split over {self.degree} ranks" if self.degree > 1 else "on one rank"
        return f"{ranks} in {self.shards} shards, with the same bits at every degree" if self.same_bits else ranks


def plan_split(
    name: str,
    config: ModelConfig,
    *,
    degree: int,
    same_bits: bool,
    packed: bool = False,
    even: int = 1,
    most: int | None = None,
    option: str = "tensor_parallel",
) -> Split:
    """Split a model, or raise InvalidRequest with the degrees that are possible.

    `even`: with the same bits across degrees, shards have as many inputs of o and down as each other, in multiples of
    this. `most`: ranks that can add to each other; None: any number. `option`: that asks for the degree."""
    group = GROUP if packed else 1
    leaves = [count for count in _powers(LEAVES) if _divides(config, count, group) and _is_even(config, count, even)]
    shards = max(leaves, default=1) if same_bits else degree
    most = max(min(config.num_heads, most or config.num_heads), 1)
    degrees = [
        count for count in range(1, most + 1) if (shards % count == 0 if same_bits else _divides(config, count, group))
    ]
    if degree not in degrees:
        bits = " with the same bits across degrees" if same_bits else ""
        groups = f" of {config.head_dim}, weights in groups of {group} inputs" if packed else ""
        if same_bits and even > 1:
            groups += f", shards with multiples of {even} inputs"
        raise InvalidRequest(
            f"{option} {degree}: {name} has {config.num_heads} attention heads and {config.num_kv_heads} "
            f"key/value heads{groups}, and can be split{bits} over {_listed(degrees)} only"
        )
    return Split(degree=degree, shards=shards, same_bits=same_bits, packed=packed)


def _powers(most: int) -> list[int]:
    return [1 << shift for shift in range(most.bit_length())]


def _divides(config: ModelConfig, shards: int, group: int) -> bool:
    """Whether each shard has as many heads as the others, the key/value heads that these read, and whole groups of
    inputs."""
    if config.num_heads % shards or shards > config.intermediate_size // group or shards > config.vocab_size:
        return False
    if config.num_heads // shards * config.head_dim % group:
        return False
    return config.num_kv_heads % shards == 0 or shards % config.num_kv_heads == 0


def _is_even(config: ModelConfig, shards: int, even: int) -> bool:
    """Whether shards have as many inputs of o and down as each other, in multiples of `even`."""
    widths = (config.num_heads * config.head_dim, config.intermediate_size)
    return even == 1 or all(width % (shards * even) == 0 for width in widths)


def _listed(degrees: list[int]) -> str:
    *others, last = map(str, degrees)
    return f"{', '.join(others)} or {last} ranks" if others else "1 rank"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that a shard has: [start, stop) along an axis."""

    axis: Axis
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def piece_of(canonical: str, config: ModelConfig, shard: int, split: Split) -> Piece | None:
    """Return the part of a canonical tensor that a shard has; None: all of it."""
    kind = canonical.removesuffix(".bias").rpartition(".")[2]
    if kind in INPUTS and not canonical.endswith(".bias"):
        start, stop = _span(kind, config, shard, split)
        return Piece("columns", start, stop)
    if kind in OUTPUTS:
        return Piece("rows", *_span(kind, config, shard, split))
    return None


def _span(kind: str, config: ModelConfig, shard: int, split: Split) -> tuple[int, int]:
    """Return the outputs, or for INPUTS the inputs, of one kind of matrix that a shard has."""
    if kind in ("embed", "head"):
        return _part(config.vocab_size, shard, split)
    if kind in ("gate", "up", "down"):
        return _columns(config, shard, split)
    if kind in ("k", "v"):
        start, stop = kv_heads(config, shard, split)
    else:
        start, stop = _part(config.num_heads, shard, split)
    return start * config.head_dim, stop * config.head_dim


def kv_heads(config: ModelConfig, shard: int, split: Split) -> tuple[int, int]:
    """Return the first key/value head of a shard, and the one after its last. Shards may have the same one."""
    if config.num_kv_heads >= split.shards:
        return _part(config.num_kv_heads, shard, split)
    head = shard * config.num_kv_heads // split.shards
    return head, head + 1


def _part(count: int, shard: int, split: Split) -> tuple[int, int]:
    return count * shard // split.shards, count * (shard + 1) // split.shards


def _columns(config: ModelConfig, shard: int, split: Split) -> tuple[int, int]:
    """Return the columns of the MLP that a shard has: whole groups."""
    start, stop = _part(config.intermediate_size // split.group, shard, split)
    return start * split.group, stop * split.group


def inputs_of_shards(kind: str, config: ModelConfig, rank: int, split: Split) -> list[int]:
    """Count the inputs of o, or of down, that each shard of a rank has."""
    return [stop - start for start, stop in (_span(kind, config, shard, split) for shard in split.of_rank(rank))]


def vocabulary(config: ModelConfig, shard: int, split: Split) -> tuple[int, int]:
    """Return the first token of a shard's embeddings and outputs, and the one after its last."""
    return _part(config.vocab_size, shard, split)


def shard_config(config: ModelConfig, shard: int, split: Split) -> ModelConfig:
    """Return the config of a shard: a decoder with some of the heads, MLP columns and tokens."""
    first, end = kv_heads(config, shard, split)
    start, stop = _columns(config, shard, split)
    low, high = vocabulary(config, shard, split)
    return replace(
        config,
        num_heads=config.num_heads // split.shards,
        num_kv_heads=end - first,
        intermediate_size=stop - start,
        vocab_size=high - low,
        eos_ids=(),
        bos_id=None,
    )
