"""Block drafters with random weights in memory, and in each layout in which they are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.quant import Weight
from paceline.models.block_config import BlockConfig, Convolutions, Markov
from paceline.models.block_heads import BlockHead
from paceline.models.config import ModelConfig
from tests.cli.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP
from tests.heads import layer_shapes, write_head

DRAFT = 60  # tokens of a draft vocabulary


def random_block(
    target: ModelConfig,
    *,
    taps: tuple[int, ...] = (0, 1),
    layers: int = 2,
    block_size: int = 5,
    window: int = 0,
    draft_vocab: int | None = None,
    markov: Markov | None = None,
    convolutions: Convolutions | None = None,
    seed: int = 0,
    **options: Any,
) -> BlockHead:
    """`options`: further fields of its config."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"num_layers": layers, "qk_norm": True, "windows": (window,) * layers if window else ()}
    size = draft_vocab or target.vocab_size
    config = BlockConfig(
        decoder=replace(target, tied_head=False, **sizes),
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        taps=taps,
        block_size=block_size,
        mask_token=3,
        causal=(bool(window),) * layers,
        markov=markov,
        convolutions=convolutions,
        **options,
    )
    weights: dict[str, Weight] = {}
    for name, shape in _shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * drawn if name.endswith("norm") else 0.2 * drawn
    ids = torch.randperm(target.vocab_size, generator=generator)[:size].sort().values.to(torch.int32)
    return BlockHead(config=config, weights=weights, ids=ids)


def _shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    decoder, hidden, vocab = config.decoder, config.decoder.hidden_size, config.decoder.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, config.width), "context_norm": (hidden,), "norm": (hidden,)}
    for index in range(decoder.num_layers):
        of = f"layers.{index}."
        shapes |= {of + name: shape for name, shape in layer_shapes(decoder, wide=False).items()}
        shapes[f"{of}attn_norm"] = (hidden,)
        if config.convolutions is not None:
            taps, group = config.convolutions.taps, config.convolutions.group
            for name in ("attn_conv", "mlp_conv"):
                shapes[f"{of}{name}.base"] = (2 * taps, hidden)
                shapes[f"{of}{name}.kernel"] = (2 * taps * (hidden // group), hidden)
    if config.draft_vocab_size != vocab:
        shapes["head"] = (config.draft_vocab_size, hidden)
    if config.markov is not None:
        rank = config.markov.rank
        shapes |= {"markov.before": (vocab, rank), "markov.after": (config.draft_vocab_size, rank)}
        shapes |= {"markov.gate": (rank, hidden + rank)} if config.markov.kind == "gated" else {}
        shapes |= {"markov.joint": (3 * rank, 2 * rank + hidden)} if config.markov.kind == "rnn" else {}
        if config.confidence == "states and tokens":
            shapes |= {"confidence": (1, hidden + rank), "confidence.bias": (1,)}
    if config.selector is not None:
        rank = config.selector.rank
        shapes |= {"selector.before": (vocab, rank), "selector.after": (vocab, rank), "selector.states": (rank, hidden)}
    return shapes


# ── published layouts ──

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 6,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [-1, 0, 1]},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 5}]},
    "aux_hidden_state_layer_ids": [0, 1, 2],
    "mask_token_id": 7,
    "block_size": 6,
    "target_hidden_size": None,
}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "target_layer_ids": [-1, 0, 1],
    "mask_token_id": 7,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2 = {
    **Z_LAB,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "mask_token_id": 7,
        "target_layer_ids": [-1, 0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
}
NESTED = "transformer_layer_config"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@dataclass(frozen=True)
class BlockLayout:
    """One way to publish a block drafter."""

    values: Mapping[str, Any]
    shape: Mapping[str, Any] = field(default_factory=dict)  # of its layers
    nested: bool = False  # the config of the layers stands under a key of its own
    prefix: str = ""  # of its tensors
    own: tuple[str, ...] = ()  # "embed_tokens" and "lm_head", where it has its own

    def write(self, folder: Path, *, vocab: int, seed: int = 0) -> Path:
        inner = {**SHAPE, "vocab_size": vocab, **self.shape}
        values = {**self.values, NESTED: inner} if self.nested else {**inner, **self.values}
        tensors = self.tensors(inner, vocab, torch.Generator().manual_seed(seed))
        return write_head(folder, values, {self.prefix + name: tensor for name, tensor in tensors.items()})

    def tensors(self, shape: Mapping[str, Any], vocab: int, random: torch.Generator) -> dict[str, Tensor]:
        def draw(*size: int) -> Tensor:
            return (1 if len(size) == 1 else 0) + 0.2 * torch.randn(size, generator=random)

        sizes = self.sizes(shape, vocab)
        tensors = {name: draw(*size) - (1 if name.endswith("bias") else 0) for name, size in sizes.items()}
        if "draft_vocab_size" in self.values:
            ids = torch.randperm(vocab, generator=random)[:DRAFT].sort().values
            tensors["d2t"] = ids - torch.arange(DRAFT)
        return tensors

    def sizes(self, shape: Mapping[str, Any], vocab: int) -> dict[str, tuple[int, ...]]:
        every = {**self.values, **self.values.get("dflash_config", {})}
        size = every.get("draft_vocab_size", vocab)
        sizes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
        sizes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
        for index in range(shape["num_hidden_layers"]):
            sizes |= {f"layers.{index}.{name}": one for name, one in _layer(every, shape).items()}
        owned = {"embed_tokens": (vocab, HIDDEN), "lm_head": (size, HIDDEN)}
        sizes |= {f"{name}.weight": owned[name] for name in self.own}
        return sizes | _dspark(every, size, vocab) | _dflash2(every, vocab)


def _layer(every: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    sizes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in matrices.items()}
    sizes |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (HIDDEN,))
    sizes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (HEAD_DIM,))
    if shape.get("attention_bias"):
        sizes |= {f"{name}.bias": size[:1] for name, size in matrices.items() if "self_attn" in name}
    if "conv_group_size" in every:
        taps, groups = every["conv_kernel_size"], HIDDEN // every["conv_group_size"]
        for name in ("attention_conv", "mlp_conv"):
            sizes[f"{name}.base_kernel"] = (2, taps, HIDDEN)
            sizes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, HIDDEN)
    return sizes


def _dspark(every: Mapping[str, Any], size: int, vocab: int) -> dict[str, tuple[int, ...]]:
    rank, sizes = every.get("markov_rank", 0), dict[str, tuple[int, ...]]()
    if rank:
        sizes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (size, rank)}
    extra = {"gated": ("gate_proj", rank, HIDDEN + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + HIDDEN)}
    if every.get("markov_head_type") in extra:
        name, outputs, inputs = extra[every["markov_head_type"]]
        sizes |= {f"markov_head.{name}.weight": (outputs, inputs), f"markov_head.{name}.bias": (outputs,)}
    if every.get("enable_confidence_head"):
        inputs = HIDDEN + (rank if every.get("confidence_head_with_markov") else 0)
        sizes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    return sizes


def _dflash2(every: Mapping[str, Any], vocab: int) -> dict[str, tuple[int, ...]]:
    if "selector_rank" not in every:
        return {}
    rank = every["selector_rank"]
    return {
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
    }


LAYOUTS: Mapping[str, BlockLayout] = {
    "dflash": BlockLayout(Z_LAB),
    "dflash, windows": BlockLayout(Z_LAB, SLIDING),
    "dflash, windows both ways": BlockLayout(
        {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 3, "causal": False}}
    ),
    "dflash, biases, scales and a soft cap": BlockLayout(
        {**Z_LAB, "final_logit_softcapping": 5.0, "output_multiplier": 1.5, "input_embedding_scale": 3.0},
        {"attention_bias": True},
    ),
    "dflash, anchor first": BlockLayout({**Z_LAB, "sample_from_anchor": True}),
    "speculators": BlockLayout(SPECULATORS, SLIDING, nested=True),
    "speculators, both ways, own vocabulary": BlockLayout(
        {**SPECULATORS, "draft_vocab_size": DRAFT, "sliding_window_non_causal": True},
        SLIDING,
        nested=True,
        prefix="model.",
        own=("embed_tokens", "lm_head"),
    ),
    "dspark": BlockLayout(DSPARK, own=("embed_tokens", "lm_head")),
    "dspark, gated": BlockLayout({**DSPARK, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    "dspark, rnn": BlockLayout({**DSPARK, "markov_head_type": "rnn", "enable_confidence_head": False}),
    "dspark, speculators": BlockLayout(
        {**SPECULATORS, "speculators_model_type": "dspark", "markov_rank": 8, "draft_vocab_size": DRAFT},
        nested=True,
        own=("lm_head",),
    ),
    "dspark, causal": BlockLayout({**DSPARK, "is_causal": True}),
    "dflash2": BlockLayout(DFLASH2),
    "dflash2, windows": BlockLayout({**DFLASH2, "is_causal": False}, SLIDING),
    "dflash2, own vocabulary": BlockLayout({**DFLASH2, "draft_vocab_size": DRAFT}, own=("lm_head",)),
}
