"""Block drafters at the start of a training: their shape from the target's, initial weights, and the mask token; and
block drafters that were trained before, read back to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, UnsupportedModel
from paceline.models.block_heads import BlockHead, load_block
from paceline.models.config import ModelConfig
from paceline.train.data.answers import Exchange
from paceline.train.data.teacher import Teacher
from paceline.train.options import TrainOptions
from paceline.train.seeds import BLOCK_STREAM, seeded_generator
from paceline.train.students.block import W1, W2, BlockShape, BlockStudent
from paceline.train.students.initial_weights import INITIAL_STD, token_counts
from paceline.train.students.packing import FUSION, Packing

EARLY, LATE = 2, 3  # layers at the beginning and at the end of a deep target without taps: they know little but a token
LAYER_NAMES = {  # name in `models.block_heads` → name in training and in files
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
NAMES = {
    "fc": FUSION,
    "context_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "markov.before": W1,
    "markov.after": W2,
}


def block_taps(layers: int, count: int) -> tuple[int, ...]:
    """Spread taps evenly over a target of so many layers, from an early one to a late one."""
    first, last = (EARLY, layers - LATE) if layers > EARLY + LATE else (0, layers - 1)
    if not 1 <= count <= last - first + 1:
        raise InvalidRequest(f"--taps {count} must be 1 to {last - first + 1} for a target of {layers} layers")
    return tuple(last - round(index * (last - first) / max(1, count - 1)) for index in reversed(range(count)))


def block_shape(options: TrainOptions, config: ModelConfig, trained: Sequence[Exchange]) -> BlockShape:
    if options.block < 2:
        raise InvalidRequest(f"--block {options.block} must be at least 2: a row for the last token, and one to guess")
    return BlockShape(
        hidden=config.hidden_size,
        intermediate=options.intermediate or config.intermediate_size,
        layers=options.layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        taps=block_taps(config.num_layers, options.taps),
        block=options.block,
        markov=options.markov,
        mask_token=rarest_token(trained, config.vocab_size),
        eps=config.norm_eps,
        theta=config.rope_theta,
        max_context=config.max_context,
    )


def rarest_token(trained: Sequence[Exchange], vocab: int) -> int:
    """Choose the mask: a token that the target hardly ever says, so that it means nothing else; of several the last."""
    counts = token_counts(trained, vocab)
    return int((counts == counts.min()).nonzero()[0][-1])


def new_block(
    shape: BlockShape, teacher: Teacher, *, scale: Tensor, dtype: torch.dtype, seed: int, packing: Packing
) -> BlockStudent:
    """Create a drafter whose context begins as the last feature, and whose last norm is the target's. Its layers add to
    the residual stream at once: that begins with the mask, which must not be the guess."""
    random = seeded_generator(seed, BLOCK_STREAM)
    params = {name: torch.ones(size) for name, size in shape.sizes().items()}
    for name, ones in params.items():
        if ones.dim() == 2:
            params[name] = torch.randn(ones.shape, generator=random) * INITIAL_STD
    params[FUSION][:, -shape.hidden :] += torch.eye(shape.hidden)
    params["norm.weight"] = teacher.norm.float().cpu()
    if shape.markov:
        params[W2] = torch.zeros(params[W2].shape)
    return BlockStudent(shape, params=params, feature_scale=scale, dtype=dtype, packing=packing)


def read_block_student(folder: Path, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> BlockStudent:
    """Read a block drafter with the features that training has; one with others is refused."""
    head = load_block(folder, target).in_floats()
    shape = _shape(folder, head, target)
    names = NAMES | {
        f"layers.{i}.{name}": f"layers.{i}.{there}.weight"
        for i in range(shape.layers)
        for name, there in LAYER_NAMES.items()
    }
    more = sorted(head.weights.keys() - names.keys())
    if more:
        raise UnsupportedModel(f"{folder}: a block drafter with {more[0]} drafts, but is not measured here")
    params = {names[name]: weight for name, weight in head.weights.items() if isinstance(weight, Tensor)}
    return BlockStudent(shape, params=params, feature_scale=torch.ones(head.config.width, device=device), dtype=dtype)


def _shape(folder: Path, head: BlockHead, target: ModelConfig) -> BlockShape:
    config, layer = head.config, head.config.decoder
    markov = 0 if config.markov is None else config.markov.rank
    for wrong, what in (
        (any(config.causal) or bool(layer.windows), "windows or causal layers"),
        (config.markov is not None and config.markov.kind != "vanilla", "a markov head other than vanilla"),
        (config.anchor_first != bool(markov), "a layout that training does not have"),
        (max(config.taps) > target.num_layers, "a hidden state after the last layer"),
        (config.draft_vocab_size != layer.vocab_size, "a draft vocabulary"),
        ((config.embedding_scale, config.logit_scale, config.softcap) != (1.0, 1.0, 0.0), "scaled inputs or outputs"),
    ):
        if wrong:
            raise UnsupportedModel(f"{folder}: a block drafter with {what} drafts, but is not measured here")
    return BlockShape(
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        layers=layer.num_layers,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab=layer.vocab_size,
        taps=config.taps,
        block=config.block_size,
        markov=markov,
        mask_token=config.mask_token,
        eps=layer.norm_eps,
        theta=layer.rope_theta,
        max_context=layer.max_context,
        scaling=layer.rope_scaling,
    )
