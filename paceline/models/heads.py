"""EAGLE and Medusa-1 heads, read from the files in which they are published.

`models.eagle_config` says what an EAGLE head computes, and reads its config.json. Here are its weights, by names that
do not depend on the layout of the file. An MTP head is one of them, found and described in `models.mtp`. Medusa heads
read the target's last hidden state alone; each guesses the token one position after that of the head before it. A head
that does not fit the target raises an error here; it is not left to draft badly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, ModelFileError
from paceline.kernels.quant import GROUP, Quantised, Weight, dequantise, quantise, values_of
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.eagle_config import EagleConfig, eagle_config
from paceline.models.fields import Fields
from paceline.models.head_tensors import HeadTensors
from paceline.models.weights import described

# Prefixes of published names, see HeadTensors. One layer has no number in some layouts.
EAGLE_NAMES = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
MEDUSA_NAMES = {"medusa_head.": "", "medusa_heads.": ""}
BITS = {"int8": 8, "int4": 4}
SKETCH = "lm_head.sketch"  # the tensor of EagleHead.sketch


@dataclass(frozen=True, slots=True)
class EagleHead:
    """An EAGLE head.

    weights: fc, layers.i.{attn_norm, q, k, v, o, q_norm, k_norm, mlp_norm, gate, up, down}, biases as NAME.bias; where
    the network has them embed_norm, state_norm, fc_norm, norm and mask, the features of drafted positions; and embed
    and head unless the head uses those of the target. `layers.0.attn_norm` is the norm of g in EAGLE-3.
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
    values = read_json(path)
    file = HeadTensors(directory, prefixes=EAGLE_NAMES, blank=blank)
    config = eagle_config(values, target, source=str(path), has=file.__contains__)
    return take_head(file, config, target)


def take_head(file: HeadTensors, config: EagleConfig, target: ModelConfig) -> EagleHead:
    """Take all tensors of a head; raise if one is missing, does not fit, or is left."""
    weights = _eagle_weights(file, config, target)
    ids, sketch = _ids(file, config), _sketch(file, config.decoder.hidden_size)
    file.leave(*(name for name in file.names() if name.endswith("rotary_emb.inv_freq")))  # computed, not read
    file.finish()
    return EagleHead(config=config, weights=weights, ids=ids, sketch=sketch, files=tuple(file.files()))


def _eagle_weights(file: HeadTensors, config: EagleConfig, target: ModelConfig) -> dict[str, Weight]:
    hidden = config.decoder.hidden_size
    weights: dict[str, Weight] = {**_matrix(file, "fc", "fc", hidden, config.fc_inputs)}
    weights |= _norms(file, config)
    for index in range(config.decoder.num_layers):
        weights |= _layer(file, config, index)
    if config.mask_token is not None:
        weights["mask"] = file.flat("mask_hidden", (1, 1, config.width))
    if "lm_head.weight" in file:
        weights["head"] = file.matrix("lm_head", config.draft_vocab_size, hidden)
    else:
        _check_shared(file, "lm_head.weight", "output layer", config, target)
    if "embed_tokens.weight" in file:
        weights["embed"] = file.matrix("embed_tokens", target.vocab_size, hidden)
    else:
        _check_shared(file, "embed_tokens.weight", "embedding", config, target)
    return weights


def _check_shared(file: HeadTensors, name: str, what: str, config: EagleConfig, target: ModelConfig) -> None:
    """Raise if the head lacks a matrix, and cannot use that of the target."""
    hidden, size = config.decoder.hidden_size, config.draft_vocab_size
    if hidden != target.hidden_size:
        raise ModelFileError(
            f"{file.label}: {name} is missing, and the target's {what} of {target.hidden_size} does not fit a head of "
            f"{hidden}"
        )
    if what == "output layer" and size != target.vocab_size:
        raise ModelFileError(
            f"{file.label}: {name} [{size}, {hidden}] is missing, and the target's has {target.vocab_size} outputs"
        )


def _norms(file: HeadTensors, config: EagleConfig) -> dict[str, Weight]:
    """Take the norms outside of the layers."""
    if config.state_norm is None:
        return {}
    hidden, each = config.decoder.hidden_size, config.target_hidden_size
    if config.usual_layers:
        return {name: file.vector(f"{name}.weight", hidden) for name in ("embed_norm", "state_norm", "norm")}
    norms: dict[str, Weight] = {
        "embed_norm": file.vector("layers.0.input_layernorm.weight", hidden),
        "norm": file.vector("norm.weight", hidden),
    }
    if config.feature_norms == 1 and "fc_norm.0.weight" not in file:
        norms["fc_norm"] = file.vector("input_norm.weight", config.width)
    elif config.feature_norms:
        parts = [file.vector(f"fc_norm.{i}.weight", each) for i in range(config.feature_norms)]
        # Joining tensors without data would import torch's compiler, which takes seconds.
        norms["fc_norm"] = torch.empty(config.width, device="meta") if file.blank else torch.cat(parts)
    return norms


def _layer(file: HeadTensors, config: EagleConfig, index: int) -> dict[str, Weight]:
    """Take one layer. The first reads token and state side by side in EAGLE-3, and has no norm before it in EAGLE-1."""
    decoder, hidden, of = config.decoder, config.decoder.hidden_size, f"layers.{index}."
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    inputs = 2 * hidden if index == 0 and not config.fuses_tokens else hidden
    weights: dict[str, Weight] = {}
    if index or config.state_norm is not None:
        norm = "input_layernorm" if index or config.usual_layers else "hidden_norm"
        weights[f"{of}attn_norm"] = file.vector(f"{of}{norm}.weight", hidden)
    for name, outputs in {"q": queries, "k": keys, "v": keys}.items():
        weights |= _matrix(file, of + name, f"{of}self_attn.{name}_proj", outputs, inputs, bias=decoder.qkv_bias)
    if decoder.qk_norm:
        weights |= {f"{of}{n}_norm": file.vector(f"{of}self_attn.{n}_norm.weight", decoder.head_dim) for n in "qk"}
    weights |= _matrix(file, f"{of}o", f"{of}self_attn.o_proj", hidden, queries)
    weights[f"{of}mlp_norm"] = file.vector(f"{of}post_attention_layernorm.weight", hidden)
    for name in ("gate", "up"):
        weights |= _matrix(file, of + name, f"{of}mlp.{name}_proj", decoder.intermediate_size, hidden)
    return weights | _matrix(file, f"{of}down", f"{of}mlp.down_proj", hidden, decoder.intermediate_size)


def _matrix(
    file: HeadTensors, name: str, published: str, outputs: int, inputs: int, *, bias: bool = False
) -> dict[str, Weight]:
    """Take a matrix, and its bias if the file has one; `bias`: it must have one."""
    found: dict[str, Weight] = {name: file.matrix(published, outputs, inputs)}
    if bias or f"{published}.bias" in file:
        found[f"{name}.bias"] = file.vector(f"{published}.bias", outputs)
    return found


def _ids(file: HeadTensors, config: EagleConfig) -> Tensor:
    """Read the target's token for each output of the head, int32 [draft vocabulary]."""
    vocab, size = config.decoder.vocab_size, config.draft_vocab_size
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
