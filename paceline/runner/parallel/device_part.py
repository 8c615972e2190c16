"""The part of a model that one rank has on its own GPU: weights from files or random ones, and a decoder of them.

q, k, v, gate, up   some heads, and some columns of the MLP
o, down             the inputs that these compute,
head                the outputs of some tokens
embedding, norms    whole: they are read once a token, or small
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from paceline.errors import InvalidRequest
from paceline.kernels.cuda.exchange import Peers
from paceline.kernels.cuda.tiles import parts_of
from paceline.kernels.quant import Weight
from paceline.models.config import ModelConfig
from paceline.models.load import OpenModel
from paceline.models.weights import Device, Format, Progress, load_weights
from paceline.runner.forwards.cuda_share import CudaShare
from paceline.runner.parallel.sharded_source import ShardedSource
from paceline.runner.parallel.split import INPUTS, Split, piece_of, shard_config, vocabulary

WHOLE = ("embed", "head")  # read whole; then each rank keeps its rows of the head
SCALED = ("int8", "fp8")  # formats with one scale for all inputs of an output


def rank_config(config: ModelConfig, rank: int, split: Split) -> ModelConfig:
    """Return the config of a rank's decoder: its heads and MLP columns, and the whole vocabulary."""
    return replace(shard_config(config, rank, split.by_ranks), vocab_size=config.vocab_size)


def share_of(config: ModelConfig, split: Split, peers: Peers) -> CudaShare:
    """Return how a rank's decoder is packed, and whom it meets. `config`: of the whole model."""
    parts = {}
    if split.same_bits:  # the parts of o and down are shards, and the others those that the whole model would have
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        wide = {"q": queries + 2 * keys, "embed": config.vocab_size, "head": config.vocab_size}
        parts = {name: parts_of(outputs, config.hidden_size, gated=False) for name, outputs in wide.items()}
        parts |= dict.fromkeys(INPUTS, split.shards // split.degree)
    return CudaShare(peers, parts, columns=config.vocab_size)


def read_weights(
    opened: OpenModel, *, format: Format, device: Device, rank: int, split: Split, progress: Progress | None = None
) -> dict[str, Weight]:
    """Read a rank's weights from files."""
    source = ShardedSource(opened.source, opened.config, shard=rank, split=split.by_ranks, whole=WHOLE)
    config = rank_config(opened.config, rank, split)
    weights = load_weights(source, config, format=format, device=device, progress=progress)
    return with_own_head(weights, opened.config, rank=rank, split=split)


def format_of_ranks(format: Format, split: Split, *, quantised: bool) -> Format:
    """Return the format of weights that are split on GPUs, from a resolved one: the bits of a quantised file are not
    cut, and become bf16."""
    if split.same_bits and format in SCALED:
        raise InvalidRequest(
            f"same_bits_across_degrees: {format} weights have one scale for all inputs, and are not cut inside a rank; "
            "take format bf16 or int4"
        )
    return "bf16" if format == "native" and quantised else format


def cut_weights(
    drawn: Iterable[tuple[str, Tensor]], config: ModelConfig, *, rank: int, split: Split
) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's part of each of a model's weights, but for the head, which is whole yet."""
    for name, weight in drawn:
        piece = None if name in WHOLE else piece_of(name, config, rank, split.by_ranks)
        if piece is None:
            yield name, weight
        elif piece.axis == "rows":
            yield name, weight[piece.start : piece.stop].clone()
        else:
            yield name, weight[:, piece.start : piece.stop].contiguous()


def with_own_head(weights: dict[str, Weight], config: ModelConfig, *, rank: int, split: Split) -> dict[str, Weight]:
    """Keep a rank's rows of the head; those of a tied one are copied from the embedding."""
    if split.degree > 1:
        low, high = vocabulary(config, rank, split.by_ranks)
        whole = weights["embed" if config.tied_head else "head"]

        def own(part: Tensor) -> Tensor:
            return part[low:high].clone()

        weights["head"] = own(whole) if isinstance(whole, Tensor) else whole.each(own)
    return weights
