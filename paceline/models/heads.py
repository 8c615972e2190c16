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
from paceline.kernels.quant import GROUP, Weight, values_of
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.eagle_config import EagleConfig, eagle_config
from paceline.models.fields import Fields
from paceline.models.head_layers import draft_ids, ends_of_network, in_format, layer_weights, matrix
from paceline.models.head_tensors import HeadTensors

# Prefixes of published names, see HeadTensors. One layer has no number in some layouts.
EAGLE_NAMES = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
MEDUSA_NAMES = {"medusa_head.": "", "medusa_heads.": ""}
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
        changed = {name: in_format(weight, format) for name, weight in self.weights.items() if name != "fc"}
        return replace(self, weights={**changed, "fc": in_format(self.weights["fc"], "fp32")})

    @property
    def parameters(self) -> int:
        return sum(values_of(weight).numel() for weight in self.weights.values())


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One Medusa head: `blocks` of x + silu(W x + b), then a product with `head` over the target's vocabulary."""

    blocks: tuple[tuple[Weight, Tensor], ...]
    head: Weight

    def in_format(self, format: str) -> MedusaHead:
        blocks = tuple((in_format(weight, format), bias) for weight, bias in self.blocks)
        return MedusaHead(blocks=blocks, head=in_format(self.head, format))


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
    ids = draft_ids(file, size=config.draft_vocab_size, vocab=config.decoder.vocab_size)
    sketch = _sketch(file, config.decoder.hidden_size)
    file.leave(*(name for name in file.names() if name.endswith("rotary_emb.inv_freq")))  # computed, not read
    file.finish(_asking(config))
    return EagleHead(config=config, weights=weights, ids=ids, sketch=sketch, files=tuple(file.files()))


def _asking(config: EagleConfig) -> dict[str, str]:
    """Map parts of the names of tensors that a head does not have to the values in config.json that ask for them."""
    if config.kind == "MTP":
        return {}
    keys = {f"layers.{config.decoder.num_layers}.": "a larger num_hidden_layers"}
    if config.kind == "EAGLE-1":
        return keys
    if not config.feature_norms:
        keys |= {"fc_norm.": "fc_norm true", "input_norm.": "norm_before_fc true"}
    return keys if config.mask_token is not None else {**keys, "mask_hidden": "parallel_drafting true"}


def _eagle_weights(file: HeadTensors, config: EagleConfig, target: ModelConfig) -> dict[str, Weight]:
    hidden = config.decoder.hidden_size
    weights: dict[str, Weight] = {**matrix(file, "fc", "fc", hidden, config.fc_inputs)}
    weights |= _norms(file, config)
    for index in range(config.decoder.num_layers):
        weights |= _layer(file, config, index)
    if config.mask_token is not None:
        weights["mask"] = file.flat("mask_hidden", (1, 1, config.width))
    return weights | ends_of_network(file, config.decoder, config.draft_vocab_size, target)


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
    usual = index > 0 or config.usual_layers
    norm = "input_layernorm" if usual else None if config.state_norm is None else "hidden_norm"
    inputs = None if index or config.fuses_tokens else 2 * config.decoder.hidden_size
    return layer_weights(file, config.decoder, index, norm=norm, inputs=inputs)


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
            f"and {target.vocab_size}; take heads that were trained for this target (hidden_size {target.hidden_size}, "
            f"vocab_size {target.vocab_size})"
        )
    file = HeadTensors(directory, prefixes=MEDUSA_NAMES)
    heads = [_medusa_head(file, index, layers, hidden, vocab) for index in range(count)]
    file.leave(*(name for name in file.names() if name.split(".")[0].isdigit()))  # heads beyond medusa_num_heads
    file.finish({})
    return heads


def _medusa_head(file: HeadTensors, index: int, layers: int, hidden: int, vocab: int) -> MedusaHead:
    blocks = []
    for layer in range(layers):
        name = f"{index}.{layer}.linear"
        blocks.append((file.matrix(name, hidden, hidden), file.vector(f"{name}.bias", hidden)))
    return MedusaHead(blocks=tuple(blocks), head=file.matrix(f"{index}.{layers}", vocab, hidden))
