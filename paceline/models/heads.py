"""EAGLE-3 and Medusa-1 heads, read from the files in which they are published.

An EAGLE-3 head is one decoder layer. At position i it combines a state g with the embedding of token i + 1 and guesses
token i + 2. The state comes from the target's hidden states at three taps, or is the head's own output one position
before:

    g = fc(three hidden states), or the y of the position before
    x = g + attention(norm(embedding) │ norm(g))
    y = x + mlp(norm(x));   logits = head(norm(y)), over a draft vocabulary that `ids` translates

Two layouts are read: `LlamaForCausalLMEagle3` and that of the `speculators` library. Medusa heads read the target's
last hidden state alone; each guesses the token one position after that of the head before it. A head that does not fit
the target raises an error here; it is not left to draft badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, ModelFileError, UnsupportedModel, VocabularyMismatch
from paceline.kernels.quant import GROUP, Quantised, Weight, dequantise, quantise, values_of
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.fields import Fields
from paceline.models.head_tensors import HeadTensors
from paceline.models.hf_config import config_from_hf
from paceline.models.weights import described

EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_NAMES = {"model.": "", "midlayer.": "layer.", "layers.0.": "layer."}  # prefixes, see HeadTensors
MEDUSA_NAMES = {"medusa_head.": "", "medusa_heads.": ""}
BITS = {"int8": 8, "int4": 4}
SKETCH = "lm_head.sketch"  # the tensor of EagleHead.sketch


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The config of an EAGLE-3 head."""

    layer: ModelConfig  # config of its one layer; `vocab_size` is the target's
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]  # layers of the target whose input it reads, in the order of fc's inputs
    norm_first: bool  # True: the residual stream begins with norm(g), not with g


@dataclass(frozen=True, slots=True)
class EagleHead:
    """An EAGLE-3 head.

    weights: fc  embed_norm  hidden_norm  q  k  v  o  mlp_norm  gate  up  down  norm  head, and embed unless the head
    uses the target's embedding
    """

    config: EagleConfig
    weights: dict[str, Weight]
    ids: Tensor  # int32 [draft vocabulary]: the target's token for each output
    # int8 [r, hidden]: basis of the subspace that contains most inputs of the output layer, see runner/heads/sketch.py
    sketch: Tensor | None = None
    files: tuple[Path, ...] = ()  # files of the tensors

    def in_format(self, format: str) -> EagleHead:
        """Convert matrices to fp32, int8 or int4 (integers in groups of 32); `fc` reads hidden states and is fp32."""
        changed = {name: _in_format(weight, format) for name, weight in self.weights.items() if name != "fc"}
        return replace(self, weights={**changed, "fc": _in_format(self.weights["fc"], "fp32")})

    @property
    def parameters(self) -> int:
        return sum(values_of(weight).numel() for weight in self.weights.values())


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One Medusa head: `blocks` of x + silu(W x + b), then a product with `head` over the target's vocabulary."""

    blocks: tuple[tuple[Weight, Tensor], ...]
    head: Weight

    def in_format(self, format: str) -> MedusaHead:
        blocks = tuple((_in_format(weight, format), bias) for weight, bias in self.blocks)
        return MedusaHead(blocks=blocks, head=_in_format(self.head, format))


def load_eagle(directory: Path, target: ModelConfig, *, blank: bool = False) -> EagleHead:
    """Load a head. `blank`: its tensors are without data, on the device "meta"; only headers are read."""
    path = member(directory, "config.json")
    config = eagle_config(read_json(path), target, source=str(path))
    file = HeadTensors(directory, prefixes=EAGLE_NAMES, blank=blank)
    weights = _eagle_weights(file, config, target)
    ids, sketch = _ids(file, config), _sketch(file, config.layer.hidden_size)
    file.finish()
    return EagleHead(config=config, weights=weights, ids=ids, sketch=sketch, files=tuple(file.files()))


def eagle_config(values: Mapping[str, Any], target: ModelConfig, *, source: str) -> EagleConfig:
    fields = Fields(values, source=source)
    _check_kind(fields)
    inner = fields.inner("transformer_layer_config")
    shape = {**(inner.values or values), "architectures": ["LlamaForCausalLM"]}
    layers = Fields(shape, source=source).integer("num_hidden_layers", 1)
    if layers != 1:
        raise UnsupportedModel(f"{source}: a head of {layers} layers; EAGLE-3 heads have one")
    layer = config_from_hf({"rms_norm_eps": 1e-5, **shape, "num_hidden_layers": 1}, source=source)
    config = EagleConfig(
        layer=layer,
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size, high=layer.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", layer.hidden_size, high=1 << 17),
        taps=_taps(fields, target),
        norm_first=fields.flag("norm_before_residual", False),
    )
    _check_target(config, target, source)
    return config


def _check_kind(fields: Fields) -> None:
    names = fields.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    kind = fields.get("speculators_model_type")
    if name not in EAGLE and kind != "eagle3":
        raise UnsupportedModel(
            f"{fields.source}: {kind or name!r:.100} is no EAGLE-3 head; supported: {', '.join(EAGLE)}, or a "
            "speculators_model_type of eagle3"
        )
    if fields.inner("eagle_config").flag("use_aux_hidden_state", True) is False:
        raise UnsupportedModel(f"{fields.source}: a head on the last hidden state alone (use_aux_hidden_state false)")
    for key in ("norm_before_fc", "parallel_drafting"):
        if fields.flag(key, False):
            raise UnsupportedModel(f"{fields.source}: {key}, which Paceline does not know")


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    layers = target.num_layers
    inner = fields.inner("eagle_config")
    given = inner.get(LAYER_IDS) if inner.get(LAYER_IDS) is not None else fields.get(LAYER_IDS)
    if given is None:
        given = [2, layers // 2, layers - 3]
    if not isinstance(given, list) or len(given) != 3 or not all(type(i) is int and 0 <= i < layers for i in given):
        raise fields.error(LAYER_IDS, f"is {given!r:.100}; allowed: three layers of the target, from 0 to {layers - 1}")
    return tuple(given)


def _check_target(config: EagleConfig, target: ModelConfig, source: str) -> None:
    """Raise if sizes show that the head was trained for another target."""
    if config.target_hidden_size != target.hidden_size:
        raise InvalidRequest(
            f"{source}: a head for hidden states of size {config.target_hidden_size}, the target's have "
            f"{target.hidden_size}; take a head that was trained for this target"
        )
    if config.layer.vocab_size != target.vocab_size:
        raise VocabularyMismatch(
            f"{source}: a head for a vocabulary of {config.layer.vocab_size}, the target's has {target.vocab_size}; "
            "take a head that was trained for this target"
        )


def _eagle_weights(file: HeadTensors, config: EagleConfig, target: ModelConfig) -> dict[str, Weight]:
    layer, hidden = config.layer, config.layer.hidden_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    weights: dict[str, Weight] = {
        "fc": file.matrix("fc", hidden, 3 * config.target_hidden_size),
        "embed_norm": file.vector("layer.input_layernorm.weight", hidden),
        "hidden_norm": file.vector("layer.hidden_norm.weight", hidden),
        "q": file.matrix("layer.self_attn.q_proj", queries, 2 * hidden),
        "k": file.matrix("layer.self_attn.k_proj", keys, 2 * hidden),
        "v": file.matrix("layer.self_attn.v_proj", keys, 2 * hidden),
        "o": file.matrix("layer.self_attn.o_proj", hidden, queries),
        "mlp_norm": file.vector("layer.post_attention_layernorm.weight", hidden),
        "gate": file.matrix("layer.mlp.gate_proj", layer.intermediate_size, hidden),
        "up": file.matrix("layer.mlp.up_proj", layer.intermediate_size, hidden),
        "down": file.matrix("layer.mlp.down_proj", hidden, layer.intermediate_size),
        "norm": file.vector("norm.weight", hidden),
        "head": file.matrix("lm_head", config.draft_vocab_size, hidden),
    }
    if "embed_tokens.weight" in file:
        weights["embed"] = file.matrix("embed_tokens", target.vocab_size, hidden)
    elif hidden != target.hidden_size:
        raise ModelFileError(
            f"{file.label}: embed_tokens.weight is missing, and the target's embedding of {target.hidden_size} does "
            f"not fit a head of {hidden}"
        )
    return weights


def _ids(file: HeadTensors, config: EagleConfig) -> Tensor:
    """Read the target's token for each output of the head, int32 [draft vocabulary]."""
    vocab, size = config.layer.vocab_size, config.draft_vocab_size
    if file.blank:
        file.leave("d2t", "t2d")
        return torch.empty(size, dtype=torch.int32, device="meta")
    ids = torch.arange(size)
    if "d2t" in file:
        ids = ids + file.integers("d2t", size)
    elif size != vocab:
        raise ModelFileError(f"{file.label}: d2t is missing: which {size} of {vocab} tokens are drafted?")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        outside = ids[(ids < 0) | (ids >= vocab)]
        raise ModelFileError(
            f"{file.label}: d2t leads to token {int(outside[0])}, outside of the vocabulary of {vocab}"
        )
    if len({*ids.tolist()}) < size:
        raise ModelFileError(f"{file.label}: d2t leads to the same token twice")
    if "t2d" in file and not torch.equal(file.integers("t2d", vocab).nonzero()[:, 0], ids.sort().values):
        raise ModelFileError(f"{file.label}: t2d and d2t speak of different tokens")
    return ids.to(torch.int32)


def _sketch(file: HeadTensors, hidden: int) -> Tensor | None:
    if SKETCH not in file:
        return None
    rank = file.shape(SKETCH)[0]
    sketch = file.take(SKETCH, (rank, hidden))
    if sketch.dtype != torch.int8 or rank % GROUP or not 0 < rank <= hidden:
        raise ModelFileError(
            f"{file.label}: {SKETCH} holds {rank} rows of {sketch.dtype}; it must be int8, and a multiple of {GROUP} "
            f"rows, {hidden} at most"
        )
    return sketch


def load_medusa(directory: Path, target: ModelConfig) -> list[MedusaHead]:
    """Read Medusa heads in the order of the positions they guess: the first guesses the token after the next."""
    path = member(directory, "config.json")
    fields = Fields(read_json(path), source=str(path))
    count = fields.integer("medusa_num_heads", high=64)
    layers = fields.integer("medusa_num_layers", 1, low=0, high=16)
    hidden = fields.integer("hidden_size", target.hidden_size)
    vocab = fields.integer("vocab_size", target.vocab_size)
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise InvalidRequest(
            f"{path}: heads for hidden size {hidden} and a vocabulary of {vocab}, the target has {target.hidden_size} "
            f"and {target.vocab_size}; take heads that were trained for this target"
        )
    file = HeadTensors(directory, prefixes=MEDUSA_NAMES)
    heads = [_medusa_head(file, index, layers, hidden, vocab) for index in range(count)]
    file.leave(*(name for name in file.names() if name.split(".")[0].isdigit()))  # heads beyond medusa_num_heads
    file.finish()
    return heads


def _medusa_head(file: HeadTensors, index: int, layers: int, hidden: int, vocab: int) -> MedusaHead:
    blocks = []
    for layer in range(layers):
        name = f"{index}.{layer}.linear"
        blocks.append((file.matrix(name, hidden, hidden), file.vector(f"{name}.bias", hidden)))
    return MedusaHead(blocks=tuple(blocks), head=file.matrix(f"{index}.{layers}", vocab, hidden))


def _in_format(weight: Weight, format: str) -> Weight:
    if values_of(weight).dim() == 1:
        return weight
    if isinstance(weight, Quantised) and weight.bits == BITS.get(format):
        return weight
    if values_of(weight).is_meta:
        shape = tuple(values_of(weight).shape)
        return described(_in_format(torch.zeros((1, shape[1])), format), shape)
    whole = weight.float() if isinstance(weight, Tensor) else dequantise(weight)
    return quantise(whole, bits=BITS[format], group=GROUP) if format in BITS else whole
