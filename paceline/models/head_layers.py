"""Parts of a head's weights that are the same for every kind: decoder layers, the draft vocabulary, matrices that the
target lends, and weight formats.

Tensors come from `models.head_tensors`, under published names; the names here are those of `models.tensor_names`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.kernels.quant import GROUP, Quantised, Weight, dequantise, quantise, values_of
from paceline.models.config import ModelConfig
from paceline.models.head_tensors import HeadTensors
from paceline.models.weights import described

BITS = {"int8": 8, "int4": 4}


def layer_weights(
    file: HeadTensors,
    decoder: ModelConfig,
    index: int,
    *,
    norm: str | None = "input_layernorm",
    inputs: int | None = None,
) -> dict[str, Weight]:
    """Take one layer. `norm`: the published name of the norm before attention, None if there is none. `inputs`: columns
    that attention reads; None: the hidden size."""
    hidden, of = decoder.hidden_size, f"layers.{index}."
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    weights: dict[str, Weight] = {}
    if norm is not None:
        weights[f"{of}attn_norm"] = file.vector(f"{of}{norm}.weight", hidden)
    for name, outputs in {"q": queries, "k": keys, "v": keys}.items():
        published = f"{of}self_attn.{name}_proj"
        weights |= matrix(file, of + name, published, outputs, inputs or hidden, bias=decoder.qkv_bias)
    if decoder.qk_norm:
        weights |= {f"{of}{n}_norm": file.vector(f"{of}self_attn.{n}_norm.weight", decoder.head_dim) for n in "qk"}
    weights |= matrix(file, f"{of}o", f"{of}self_attn.o_proj", hidden, queries)
    weights[f"{of}mlp_norm"] = file.vector(f"{of}post_attention_layernorm.weight", hidden)
    for name in ("gate", "up"):
        weights |= matrix(file, of + name, f"{of}mlp.{name}_proj", decoder.intermediate_size, hidden)
    return weights | matrix(file, f"{of}down", f"{of}mlp.down_proj", hidden, decoder.intermediate_size)


def matrix(
    file: HeadTensors, name: str, published: str, outputs: int, inputs: int, *, bias: bool = False
) -> dict[str, Weight]:
    """Take a matrix, and its bias if the file has one; `bias`: it must have one."""
    found: dict[str, Weight] = {name: file.matrix(published, outputs, inputs)}
    if bias or f"{published}.bias" in file:
        found[f"{name}.bias"] = file.vector(f"{published}.bias", outputs)
    return found


def ends_of_network(file: HeadTensors, decoder: ModelConfig, size: int, target: ModelConfig) -> dict[str, Weight]:
    """Take the output layer over `size` tokens and the embedding, where the head has its own; raise if it lacks one,
    and cannot use that of the target."""
    hidden, weights = decoder.hidden_size, dict[str, Weight]()
    if "lm_head.weight" in file:
        weights["head"] = file.matrix("lm_head", size, hidden)
    else:
        _check_shared(file, "lm_head.weight", "output layer", hidden, target)
        if size != target.vocab_size:
            raise ModelFileError(
                f"{file.label}: lm_head.weight [{size}, {hidden}] is missing, and the target's has {target.vocab_size} "
                "outputs"
            )
    if "embed_tokens.weight" in file:
        weights["embed"] = file.matrix("embed_tokens", target.vocab_size, hidden)
    else:
        _check_shared(file, "embed_tokens.weight", "embedding", hidden, target)
    return weights


def _check_shared(file: HeadTensors, name: str, what: str, hidden: int, target: ModelConfig) -> None:
    if hidden != target.hidden_size:
        raise ModelFileError(
            f"{file.label}: {name} is missing, and the target's {what} of {target.hidden_size} does not fit a head of "
            f"{hidden}"
        )


def draft_ids(file: HeadTensors, *, size: int, vocab: int) -> Tensor:
    """Read the target's token, of `vocab`, for each of `size` outputs, int32 [size]. Where only headers are read, names
    and shapes alone are checked."""
    if "d2t" not in file and size != vocab:
        raise ModelFileError(f"{file.label}: d2t is missing: which {size} of {vocab} tokens are drafted?")
    offsets = file.integers("d2t", size) if "d2t" in file else None
    chosen = file.integers("t2d", vocab) if "t2d" in file else None
    if file.blank:
        return torch.empty(size, dtype=torch.int32, device="meta")
    ids = torch.arange(size) if offsets is None else torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        outside = ids[(ids < 0) | (ids >= vocab)]
        raise ModelFileError(
            f"{file.label}: d2t leads to token {int(outside[0])}, outside of the vocabulary of {vocab}"
        )
    if len({*ids.tolist()}) < size:
        raise ModelFileError(f"{file.label}: d2t leads to the same token twice")
    if chosen is not None and not torch.equal(chosen.nonzero()[:, 0], ids.sort().values):
        raise ModelFileError(f"{file.label}: t2d and d2t speak of different tokens")
    return ids.to(torch.int32)


def in_format(weight: Weight, format: str) -> Weight:
    """Convert a matrix to fp32, int8 or int4; a vector stays as it is."""
    if values_of(weight).dim() == 1:
        return weight
    if isinstance(weight, Quantised) and weight.bits == BITS.get(format):
        return weight
    if values_of(weight).is_meta:
        shape = tuple(values_of(weight).shape)
        return described(in_format(torch.zeros((1, shape[1])), format), shape)
    whole = weight.float() if isinstance(weight, Tensor) else dequantise(weight)
    return quantise(whole, bits=BITS[format], group=GROUP) if format in BITS else whole
