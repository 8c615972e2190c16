"""Drafters on paper: what each needs in memory, and the seconds of its drafts.

    none                     nothing is drafted
    ngram, suffix, prediction
                             lookups: no memory and no pass
    NAME, model:NAME         a model or a shape, in fp8 unless `format=` says otherwise
    eagle:PATH, eagle-shape  an EAGLE head: one that is here, or an EAGLE-3 head in the target's shape
    self, self:int4          the target itself in fewer bits, on its own KV memory

Every rank runs the whole drafter. The first pass of a round reads up to two tokens of each sequence, the others one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paceline.drafters.eagle.drafter import SHAPE_VOCAB
from paceline.drafters.model import GPU_FORMAT
from paceline.drafters.options import parse_options
from paceline.drafters.registry import BUILT_IN, head_directory
from paceline.errors import InvalidRequest, VocabularyMismatch
from paceline.kernels.quant import Weight, values_of
from paceline.models.config import ModelConfig
from paceline.models.heads import load_eagle
from paceline.models.shapes import eagle_shapes, is_shape
from paceline.models.weights import resolve_format
from paceline.plan.passes import Place, overlapped, pass_seconds
from paceline.plan.size import KV_BYTES, ModelSize, check_here, model_size, read_weights, size_of

LOOKUPS = ("ngram", "suffix", "prediction")
HEAD_SHAPE = "eagle-shape"
OPTIONS = {"format": str}


@dataclass(frozen=True, slots=True)
class PaperDrafter:
    """A drafter by its costs."""

    name: str
    how: str  # in words
    size: ModelSize | None = None  # None: it computes nothing
    fusing: int = 0  # weights that only the first pass of a round reads
    own_kv: bool = True  # False: it reads the target's keys and values

    @property
    def weight_bytes(self) -> int:
        return self.size.matrices + self.size.vectors + 2 * self.fusing if self.size else 0

    @property
    def kv_token(self) -> int:
        return self.size.kv_token() if self.size and self.own_kv else 0

    def seconds(self, place: Place, *, length: float, sequences: float, context: float) -> float:
        """Compute the seconds of drafts of `length` tokens, one for each sequence."""
        if self.size is None or not length:
            return 0.0
        alone, pace = Place(place.gpu), place.gpu.pace
        first = pass_seconds(self.size, alone, rows=2 * sequences, sequences=sequences, context=context)
        other = pass_seconds(self.size, alone, rows=sequences, sequences=sequences, context=context)
        reading, computing = 2 * self.fusing / pace.bandwidth, 4 * self.fusing * sequences / pace.products
        fused = overlapped(reading, computing, pace) if self.fusing else 0.0
        return min(length, 1) * (first + fused) + max(length - 1, 0) * other + length * pace.draft


def paper_drafter(words: str, target: str, size: ModelSize, *, kv_format: str, memory: float) -> PaperDrafter | None:
    """Make the drafter that a user names; None for `none`. `memory`: bytes of one GPU."""
    kind, _, rest = words.partition(":")
    if words == "none":
        return None
    if kind in LOOKUPS:
        return PaperDrafter(kind, "looks up tokens, computes nothing")
    if kind == "eagle" or words == HEAD_SHAPE:
        return _head(rest if kind == "eagle" else HEAD_SHAPE, size, memory=memory)
    if kind == "self":
        return _copy(rest, target, size, kv_format=kv_format)
    if kind in BUILT_IN and kind != "model":
        raise InvalidRequest(
            f"a plan knows no cost of the drafter {kind!r}; it knows {', '.join(LOOKUPS)}, a model or a shape, "
            f"eagle:PATH, {HEAD_SHAPE} and self"
        )
    return _model(rest if kind == "model" else words, size, kv_format=kv_format, memory=memory)


def _model(words: str, target: ModelSize, *, kv_format: str, memory: float) -> PaperDrafter:
    name, _, options = words.partition(",")
    format = parse_options("model", options, OPTIONS).get("format", GPU_FORMAT)
    size = model_size(name.removeprefix("shape:"), format=format, kv_format=kv_format, memory=memory)
    ours, theirs = target.config.vocab_size, size.config.vocab_size
    if ours != theirs and is_shape(name) and is_shape(target.name):
        raise VocabularyMismatch(f"{name} has {theirs} tokens and {target.name} {ours}: they are of two families")
    return PaperDrafter("model", f"{name} in {size.format}", size)


def _copy(rest: str, name: str, target: ModelSize, *, kv_format: str) -> PaperDrafter:
    """The copy shares embedding and norms, and is never expanded."""
    fewer = resolve_format(rest or "fp8", quantised=False, device="cuda")
    if fewer not in ("fp8", "int8", "int4", "int4-all") or target.format != "bf16":
        raise InvalidRequest(f"self:{fewer} drafts with fewer bits than the target's {target.format}; write self:fp8")
    config, weights = read_weights(name, format=fewer)
    own = {part: weight for part, weight in weights.items() if values_of(weight).dim() == 2}
    if not config.tied_head:
        del own["embed"]
    size = size_of(name, config, own, kv_number=KV_BYTES[kv_format], memory=0)
    return PaperDrafter("self", f"{name} in {size.format}, on the target's KV memory", size, own_kv=False)


def _head(name: str, target: ModelSize, *, memory: float) -> PaperDrafter:
    if name == HEAD_SHAPE:
        decoder = replace(target.config, num_layers=1, windows=(), tied_head=False)
        vocab = min(SHAPE_VOCAB, target.config.vocab_size)
        shapes = eagle_shapes(target.config, draft_vocab=vocab)
        weights: Mapping[str, Weight] = {
            part: torch.empty(shape, dtype=torch.bfloat16, device="meta") for part, shape in shapes.items()
        }
    else:
        check_here(name)
        head = load_eagle(head_directory(name.partition(",")[0]), target.config, blank=True)
        decoder, weights, vocab = head.config.decoder, head.weights, head.config.draft_vocab_size
    fusing = sum(values_of(weight).numel() for part, weight in weights.items() if part == "fc")
    size = size_of(name, _head_config(decoder, vocab), _inner(weights), kv_number=target.kv_number, memory=memory)
    return PaperDrafter("eagle", f"{name}, {vocab} tokens, bf16", size, fusing=fusing)


def _head_config(decoder: ModelConfig, vocab: int) -> ModelConfig:
    return replace(decoder, vocab_size=vocab, eos_ids=(), bos_id=None, tied_head=False)


def _inner(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights that every pass of a head reads, in 16 bits; an embedding of its own is looked up."""
    floats = {name: torch.empty(values_of(w).shape, dtype=torch.bfloat16, device="meta") for name, w in weights.items()}
    return {name: weight for name, weight in floats.items() if name != "fc"}
