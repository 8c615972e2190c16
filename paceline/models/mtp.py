"""Multi-token prediction (MTP) heads: found in a target's own checkpoint or in a directory of their own, and read.

The network is that of `models.eagle_config`; `models.mtp_forms` knows the published names. A module reads the target's
state *after its last norm*. It has one layer, whose shape is that of the target's layers, and uses the target's
embedding and output layer, unless its file has others: copies of the target's are left there. Of several modules the
first one drafts every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ModelError, ModelFileError, UnsupportedModel
from paceline.kernels.quant import Weight, dequantise
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.eagle_config import EagleConfig, check_target
from paceline.models.fields import Fields
from paceline.models.head_tensors import HeadTensors
from paceline.models.heads import EagleHead, take_head
from paceline.models.hf_config import FAMILIES, config_from_hf
from paceline.models.mtp_forms import COUNT, RUNNING, STITCHED, MtpForm, declared, form_of, refuse_others
from paceline.models.speculators_config import TYPE, published_notes
from paceline.models.weights import TensorSource, match_names

MAX_MODULES = 16
EMBEDDING = "embed_tokens.weight"
SHARED = {EMBEDDING: "an embedding", "lm_head.weight": "an output layer"}  # tensors that may be copies of the target's
COMPARED_ROWS = 16  # rows of a matrix that are compared with the target's
EQUAL, ROUNDED = 0.01, 0.2  # distance relative to the norm: of floats of 16 bits, of weights of 4 bits
LAYER = "transformer_layer_config"  # key of the layer's config in a directory of `speculators`


def load_mtp(
    directory: Path, target: ModelConfig, *, blank: bool = False, beside: TensorSource | None = None
) -> EagleHead:
    """Load the head of a directory. `blank`: its tensors are without data, on the device "meta". `beside`: the files of
    the target, which tell an embedding and an output layer of its own from copies; None: they count as copies."""
    fields = _fields(directory)
    refuse_others(fields)
    file = HeadTensors(directory, prefixes={}, blank=blank)
    form = form_of(file.names())
    if form is None:
        raise _no_tensors(fields, file)
    modules = _modules(form, fields, file.names())
    config = _config(form, fields, target, modules)
    part = _first_module(form, file, config)
    if config.draft_vocab_size == config.decoder.vocab_size:
        config = replace(config, notes=(*config.notes, *_leave_copies(part, config, target, beside)))
    head = take_head(part, config, target)
    return replace(head, weights={**head.weights, "fc": _in_order(head.weights["fc"])}) if form.hidden_first else head


def has_mtp(directory: Path) -> bool:
    """Tell whether a checkpoint has MTP modules, by its config or by its tensors."""
    return declared(_fields(directory)) is not None or form_of(HeadTensors(directory, prefixes={}).names()) is not None


def check_mtp(directory: Path) -> None:
    """Raise if the head in the checkpoint of a target cannot be used. Only headers are read."""
    fields = _fields(directory)
    load_mtp(directory, config_from_hf(fields.values, source=fields.source), blank=True)


def _fields(directory: Path) -> Fields:
    path = member(directory, "config.json")
    return Fields(read_json(path), source=str(path))


def _no_tensors(fields: Fields, file: HeadTensors) -> ModelError:
    wanted = ", ".join(f"{form.tensors}*" for form in RUNNING)
    key, kind = declared(fields), fields.get("model_type")
    if key is None:
        return UnsupportedModel(f"{file.label}: no MTP head: no tensors {wanted}")
    known = [None, *(family.model_type for family in FAMILIES.values())]
    if kind not in known and fields.get(TYPE) is None:
        return UnsupportedModel(
            f"{fields.source}: {key} is {fields.get(key)!r:.100}, and MTP heads of model_type {kind!r:.100} are not "
            f"read; those of {', '.join(form.family for form in RUNNING)} are, with tensors {wanted}"
        )
    return fields.error(
        key, f"is {fields.get(key)!r:.100}, but there are no tensors {wanted}: fetch all files again, or set it to 0"
    )


# ── the config ──


def _modules(form: MtpForm, fields: Fields, names: Iterable[str]) -> int:
    """Read the number of modules, and check that there are as many."""
    present = _numbers(form, names)
    key = next((key for key in form.counts if fields.get(key) is not None), None)
    if key is None:
        raise fields.error(
            COUNT, f"is missing, but there are tensors {form.tensors}*: set it to {len(present)}, which would fit"
        )
    count = fields.integer(key, low=0, high=MAX_MODULES)
    if present != [*range(count)]:
        raise fields.error(key, f"is {count}, but the tensors {form.tensors}* are those of modules {present}")
    if form is STITCHED and count > 1:
        raise UnsupportedModel(f"{fields.source}: {count} layers in tensors {form.tensors}*; one is supported")
    return count


def _numbers(form: MtpForm, names: Iterable[str]) -> list[int]:
    """List the modules that have tensors, by their numbers."""
    start = form.tensors + ("layers." if form is STITCHED else "")
    found = {name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start)}
    return sorted(int(number) for number in found if number.isdecimal() and len(number) < 6)


def _config(form: MtpForm, fields: Fields, target: ModelConfig, modules: int) -> EagleConfig:
    layer = _layer(fields, target)
    config = EagleConfig(
        decoder=layer,
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size, high=layer.vocab_size),
        target_hidden_size=layer.hidden_size,
        taps=(target.num_layers,),
        kind="MTP",
        norm_output=True,
        modules=modules,
        notes=published_notes(fields, target),
    )
    check_target(layer.hidden_size, layer.vocab_size, target, fields.source)
    return config


def _layer(fields: Fields, target: ModelConfig) -> ModelConfig:
    """Read the config of the layer: that of the target's first one. Sizes that `speculators` leaves out, since they are
    the defaults of their family, are the target's."""
    inner = fields.inner(LAYER)
    sizes = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_context,
    }
    values = {**sizes, **inner.values} if inner.values else fields.values
    layer = config_from_hf(values, source=inner.source if inner.values else fields.source)
    if layer.post_norms:
        raise UnsupportedModel(f"{fields.source}: an MTP layer of {layer.architecture}, with norms after its branches")
    return replace(layer, num_layers=1, windows=layer.windows[:1], tied_head=False, eos_ids=(), bos_id=None)


# ── the tensors ──


def _first_module(form: MtpForm, file: HeadTensors, config: EagleConfig) -> HeadTensors:
    """Return the tensors of the first module, under the names of `models.heads`."""
    alone = "model.embed_tokens.weight" not in file
    part = file.part("" if alone else form.tensors, form.prefixes(config.taps[0]))
    others = tuple(f"{form.tensors}{number}." for number in range(1, config.modules))
    part.leave(*(name for name in part.names() if name.startswith(others)))
    return part


def _leave_copies(
    file: HeadTensors, config: EagleConfig, target: ModelConfig, beside: TensorSource | None
) -> Iterator[str]:
    """Leave the matrices that a head shares with its target: `speculators` writes copies of them. Yield a note for
    each that is its own."""
    wanted = config.decoder.vocab_size, config.decoder.hidden_size
    for name, what in SHARED.items():
        if name not in file:
            continue
        if file.shape(name) != wanted:
            raise ModelFileError(
                f"{file.label}: tensor {name!r} is {list(file.shape(name))}; as a copy of the target's it must be "
                f"{list(wanted)}"
            )
        if beside is None or _is_copy(file, name, target, beside):
            file.leave(name)
        else:
            yield f"{what} of its own"


def _is_copy(file: HeadTensors, name: str, target: ModelConfig, beside: TensorSource) -> bool:
    """Tell by some rows whether a matrix is the target's, which may be rounded in its own file."""
    names = match_names(beside, target)
    theirs = names["embed" if name == EMBEDDING or target.tied_head else "head"]
    rows = sorted({place * (target.vocab_size - 1) // (COMPARED_ROWS - 1) for place in range(COMPARED_ROWS)})
    mine = torch.cat([file.rows(name, row, row + 1).float() for row in rows])
    known = torch.cat([beside.read_float(theirs, row, row + 1).float() for row in rows])
    limit = ROUNDED if beside.quantised else EQUAL
    return bool((mine - known).norm() <= limit * known.norm().clamp_min(1e-12))


def _in_order(fc: Weight) -> Weight:
    """Turn the columns of fc from [state, embedding] to [embedding, state]."""
    if isinstance(fc, Tensor) and fc.is_meta:
        return fc
    state, embedding = (fc if isinstance(fc, Tensor) else dequantise(fc)).chunk(2, dim=1)
    return torch.cat([embedding, state], dim=1)
