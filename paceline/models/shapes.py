"""Shapes: configs of models that are often measured, by name or from a config.json, and random weights for them.

Random weights generate no text, but take the memory and the time of real ones. They are drawn on the device, one tensor
at a time, so that a model may be larger than the host's memory. Their scale keeps the norm of every product near that
of its input: activations and logits stay finite through any number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UnknownOption
from paceline.kernels.quant import Weight
from paceline.models.block_config import BlockConfig, Markov
from paceline.models.block_heads import BlockHead
from paceline.models.config import ModelConfig, RopeScaling
from paceline.models.directory import member, read_json
from paceline.models.eagle_config import EagleConfig
from paceline.models.heads import EagleHead
from paceline.models.hf_config import config_from_hf
from paceline.models.tensor_names import expected_shapes

BIAS_STD = 0.02  # standard deviation of random biases
BLOCK_LAYERS, BLOCK_TAPS, BLOCK_ROWS = 5, 5, 8  # of a block drafter, as they are published for models of 4B to 14B
MARKOV_RANK = 256

LLAMA_3_1_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=131072,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0),
    eos_ids=(128001, 128008, 128009),
    bos_id=128000,
)
LLAMA_3_2_1B = replace(
    LLAMA_3_1_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=RopeScaling(kind="llama3", factor=32.0),
    tied_head=True,
)
QWEN3_32B = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_context=40960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
    eos_ids=(151645, 151643),
    bos_id=151643,
)
QWEN3_1_7B = replace(QWEN3_32B, hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, tied_head=True)
SMOLLM2_135M = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    tied_head=True,
    eos_ids=(2,),
    bos_id=1,
)
SHAPES = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "qwen3-32b": QWEN3_32B,
    "qwen3-1.7b": QWEN3_1_7B,
    "smollm2-135m": SMOLLM2_135M,
}


def is_shape(name: str) -> bool:
    """Whether `name` means a shape, and not a model with weights."""
    return name in SHAPES or name.endswith(".json")


def shape_config(name: str) -> ModelConfig:
    """Return the config of a known shape, or of a config.json."""
    if name in SHAPES:
        return SHAPES[name]
    if not name.endswith(".json"):
        raise UnknownOption("shape", name, [*SHAPES, "or the path of a config.json"])
    path = Path(name)
    return config_from_hf(read_json(member(path.parent, path.name)), source=name)


def random_eagle(
    target: ModelConfig, *, draft_vocab: int, device: torch.device | str, dtype: torch.dtype, seed: int = 2
) -> EagleHead:
    """Make an EAGLE-3 head of random weights: one layer in the target's shape, on three taps and its embedding."""
    decoder = replace(target, num_layers=1, windows=(), tied_head=False, qk_norm=False, post_norms=False)
    taps = tuple(min(max(tap, 0), target.num_layers - 1) for tap in (2, target.num_layers // 2, target.num_layers - 3))
    random = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Weight] = {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[1] ** -0.5, generator=random)
        for name, shape in eagle_shapes(target, draft_vocab=draft_vocab).items()
    }
    norms = ("embed_norm", "layers.0.attn_norm", "layers.0.mlp_norm", "norm")
    weights |= {name: torch.ones(target.hidden_size, device=device) for name in norms}
    config = EagleConfig(decoder, draft_vocab, target_hidden_size=target.hidden_size, taps=taps)
    return EagleHead(config=config, weights=weights, ids=torch.arange(draft_vocab, dtype=torch.int32))


def eagle_shapes(target: ModelConfig, *, draft_vocab: int) -> dict[str, tuple[int, int]]:
    """Return the shape of every matrix of an EAGLE-3 head with one layer in the target's shape, by name."""
    hidden, middle = target.hidden_size, target.intermediate_size
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    layer = {"q": (queries, 2 * hidden), "k": (keys, 2 * hidden), "v": (keys, 2 * hidden), "o": (hidden, queries)}
    layer |= {"gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle)}
    inner = {f"layers.0.{name}": shape for name, shape in layer.items()}
    return {"fc": (hidden, 3 * hidden), **inner, "head": (draft_vocab, hidden)}


def random_block(target: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int = 2) -> BlockHead:
    """Make a DSpark drafter of random weights: layers in the target's shape, with its embedding and output layer."""
    config = block_shape(target)
    weights: dict[str, Weight] = dict(_drawn(block_shapes(config), device=device, dtype=dtype, seed=seed))
    return BlockHead(config=config, weights=weights, ids=torch.arange(target.vocab_size, dtype=torch.int32))


def block_shape(target: ModelConfig) -> BlockConfig:
    """Describe the network of `random_block`."""
    last = target.num_layers - 1
    return BlockConfig(
        decoder=replace(target, num_layers=BLOCK_LAYERS, windows=(), tied_head=False, qk_norm=True, post_norms=False),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=tuple(sorted({round(last * (1 + 2 * i) / (2 * BLOCK_TAPS)) for i in range(BLOCK_TAPS)})),
        block_size=BLOCK_ROWS,
        mask_token=0,
        kind="DSpark",
        anchor_first=True,
        markov=Markov("vanilla", MARKOV_RANK),
    )


def block_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a `block_shape`, by name."""
    hidden, factors = config.target_hidden_size, (config.draft_vocab_size, MARKOV_RANK)
    layers = {name: shape for name, shape in expected_shapes(config.decoder).items() if name not in ("embed", "head")}
    own = {"fc": (hidden, config.width), "context_norm": (hidden,)}
    return {**layers, **own, "markov.before": factors, "markov.after": factors}


def random_weights(
    config: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield every canonical tensor of the model. Matrices have `dtype`, vectors float32; norms are 1."""
    yield from _drawn(expected_shapes(config), device=device, dtype=dtype, seed=seed)


def _drawn(
    shapes: Mapping[str, tuple[int, ...]], *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    random = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith("norm"):
            yield name, torch.ones(shape, device=device)
        elif len(shape) == 1:
            yield name, torch.empty(shape, device=device).normal_(std=BIAS_STD, generator=random)
        else:
            yield name, torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[1] ** -0.5, generator=random)
