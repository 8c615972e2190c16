"""Drafters on paper: what each needs in memory, and the seconds of its drafts.

    none                     nothing is drafted
    ngram, suffix, prediction
                             lookups: no memory and no pass
    NAME, model:NAME         a model or a shape, in fp8 unless `format=` says otherwise
    eagle:PATH, eagle-shape  an EAGLE head: one that is here, or an EAGLE-3 head in the target's shape
    block:PATH, block-shape  a block drafter: one that is here, or a DSpark drafter of five layers in the target's shape
    self, self:int4          the target itself in fewer bits, on its own KV memory

One rank runs the whole drafter, or all ranks of the target split a model. The first pass of a round reads up to two
tokens of each sequence, the others one. A block drafter has one pass for all tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from paceline.drafters.eagle.drafter import SHAPE_VOCAB
from paceline.drafters.model import GPU_FORMAT
from paceline.drafters.options import parse_options
from paceline.drafters.registry import BUILT_IN, head_directory
from paceline.errors import InvalidRequest, VocabularyMismatch
from paceline.kernels.quant import Weight, values_of
from paceline.models.block_heads import load_block
from paceline.models.config import ModelConfig
from paceline.models.heads import load_eagle
from paceline.models.shapes import block_shape, block_shapes, eagle_shapes, is_shape
from paceline.models.weights import resolve_format
from paceline.plan.gpus import Pace
from paceline.plan.passes import Place, overlapped, pass_seconds
from paceline.plan.size import KV_BYTES, ModelSize, check_here, model_size, read_weights, size_of

LOOKUPS = ("ngram", "suffix", "prediction")
SPLIT = ("model", "self")  # drafters that ranks can split
HEAD_SHAPE, BLOCK_SHAPE = "eagle-shape", "block-shape"
BEFORE_LAYERS = ("embed", "fc", "context_norm")  # weights of a block drafter that its pass over a block does not read
HEADS_OF_BLOCKS = ("markov.", "selector.", "confidence")  # beginnings of the names of weights behind the layers
LOOKED_UP = ("markov.before", "selector.before", "selector.after")  # of these: a token reads one row, or a few
ADDED_BYTES = 16  # moved for one logit that is changed: a product twice, the logit twice
OPTIONS = {"format": str}


@dataclass(frozen=True, slots=True)
class Block:
    """What one pass for a whole draft has beside its layers and output layer."""

    rows: int  # of each sequence
    context: int  # weights of the products that every row of a verification goes through
    heads: int  # weights of the products for each token
    corrected: int  # logits of a row that are changed by the token before; 0: none
    more_bytes: int  # in memory; below 0 where the output layer is the target's


@dataclass(frozen=True, slots=True)
class PaperDrafter:
    """A drafter by its costs."""

    name: str
    how: str  # in words
    size: ModelSize | None = None  # None: it computes nothing
    fusing: int = 0  # weights that only the first pass of a round reads
    own_kv: bool = True  # False: it reads the target's keys and values
    block: Block | None = None  # None: each token takes a pass
    ranks: int = 1  # over which it is split

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each rank that has the drafter."""
        own = self.size.matrices // self.ranks + self.size.vectors + 2 * self.fusing if self.size else 0
        return own + (self.block.more_bytes if self.block else 0)

    @property
    def kv_token(self) -> int:
        return self.size.kv_token(self.ranks) if self.size and self.own_kv else 0

    def seconds(self, place: Place, *, length: float, sequences: float, context: float) -> float:
        """Compute the seconds of drafts of `length` tokens, one for each sequence."""
        if self.size is None or not length:
            return 0.0
        own, pace = Place(place.gpu, self.ranks), place.gpu.pace
        if self.block is not None:
            return self._block_seconds(self.block, self.size, own, length, sequences, context)
        fused = _product(self.fusing, rows=2 * sequences, pace=pace)
        first = pass_seconds(self.size, own, rows=2 * sequences, sequences=sequences, context=context)
        other = pass_seconds(self.size, own, rows=sequences, sequences=sequences, context=context)
        return min(length, 1) * (first + fused) + max(length - 1, 0) * other + length * pace.draft

    def _block_seconds(
        self, block: Block, size: ModelSize, alone: Place, length: float, sequences: float, context: float
    ) -> float:
        pace, outs = alone.gpu.pace, max(length, 1) * sequences
        read = _product(block.context, rows=(1 + length) * sequences, pace=pace)
        one = pass_seconds(size, alone, rows=block.rows * sequences, outs=outs, sequences=sequences, context=context)
        added = ADDED_BYTES * block.corrected * sequences / pace.bandwidth
        token = pace.draft + _product(block.heads, rows=sequences, pace=pace) + added
        return min(length, 1) * (read + one) + length * token


def _product(weights: int, *, rows: float, pace: Pace) -> float:
    """Compute the seconds of products of rows with so many weights of 16 bits."""
    reading, computing = 2 * weights / pace.bandwidth, 2 * weights * rows / pace.products
    return overlapped(reading, computing, pace) if weights else 0.0


def split_drafter(drafter: PaperDrafter, ranks: int) -> PaperDrafter:
    """Split a drafter over the ranks of its target, or raise InvalidRequest. Its heads may not divide."""
    if drafter.name not in SPLIT:
        raise InvalidRequest(
            f"--drafter-tensor-parallel {ranks}: the drafter {drafter.name} runs whole on one rank; leave the option "
            "out, or draft with a model"
        )
    return replace(drafter, how=f"{drafter.how}, split over {ranks} ranks", ranks=ranks)


def paper_drafter(words: str, target: str, size: ModelSize, *, kv_format: str, memory: float) -> PaperDrafter | None:
    """Make the drafter that a user names; None for `none`. `memory`: bytes of the GPUs that hold it."""
    kind, _, rest = words.partition(":")
    if words == "none":
        return None
    if kind in LOOKUPS:
        return PaperDrafter(kind, "looks up tokens, computes nothing")
    if kind == "eagle" or words == HEAD_SHAPE:
        return _head(rest if kind == "eagle" else HEAD_SHAPE, size, memory=memory)
    if kind == "block" or words == BLOCK_SHAPE:
        return _block(rest if kind == "block" else BLOCK_SHAPE, size, memory=memory)
    if kind == "self":
        return _copy(rest, target, size, kv_format=kv_format)
    if kind in BUILT_IN and kind != "model":
        raise InvalidRequest(
            f"a plan knows no cost of the drafter {kind!r}; it knows {', '.join(LOOKUPS)}, a model or a shape, "
            f"eagle:PATH, {HEAD_SHAPE}, block:PATH, {BLOCK_SHAPE} and self"
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
        weights = _blank(shapes)
    else:
        check_here(name)
        head = load_eagle(head_directory(name.partition(",")[0]), target.config, blank=True)
        decoder, weights, vocab = head.config.decoder, head.weights, head.config.draft_vocab_size
    fusing = _count(weight for part, weight in weights.items() if part == "fc")
    size = size_of(name, _head_config(decoder, vocab), _inner(weights), kv_number=target.kv_number, memory=memory)
    return PaperDrafter("eagle", f"{name}, {vocab} tokens, bf16", size, fusing=fusing)


def _block(name: str, target: ModelSize, *, memory: float) -> PaperDrafter:
    if name == BLOCK_SHAPE:
        config = block_shape(target.config)
        weights = _blank(block_shapes(config))
    else:
        check_here(name)
        head = load_block(head_directory(name.partition(",")[0]), target.config, blank=True)
        config, weights = head.config, head.weights
    heads = {part: weight for part, weight in weights.items() if part.startswith(HEADS_OF_BLOCKS)}
    layers = {part: weight for part, weight in weights.items() if part not in (*BEFORE_LAYERS, *heads)}
    reading = [weight for part, weight in weights.items() if part == "fc" or part.rpartition(".")[2] in ("q", "k", "v")]
    vocab, hidden = config.draft_vocab_size, target.config.hidden_size
    read = _blank(_shapes(layers) | {"head": (vocab, hidden)})
    decoder, number = _head_config(config.decoder, vocab), target.kv_number
    size = size_of(name, decoder, read, kv_number=number, memory=memory)
    block = Block(
        rows=config.rows_for(config.longest),
        context=_count(reading),
        heads=_count(weight for part, weight in heads.items() if part not in LOOKED_UP),
        corrected=vocab if heads else 0,
        more_bytes=2 * _count(heads.values()) - (0 if "head" in weights else 2 * vocab * hidden),
    )
    how = f"{name}, {config.kind} of {config.longest} tokens, bf16"
    return PaperDrafter("block", how, size, fusing=_count([weights["fc"]]), block=block)


def _count(weights: Iterable[Weight]) -> int:
    """Count the numbers of weights."""
    return sum(values_of(weight).numel() for weight in weights)


def _shapes(weights: Mapping[str, Weight]) -> dict[str, tuple[int, ...]]:
    return {part: tuple(values_of(weight).shape) for part, weight in weights.items()}


def _blank(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    """Make weights in 16 bits without data."""
    return {part: torch.empty(shape, dtype=torch.bfloat16, device="meta") for part, shape in shapes.items()}


def _head_config(decoder: ModelConfig, vocab: int) -> ModelConfig:
    return replace(decoder, vocab_size=vocab, eos_ids=(), bos_id=None, tied_head=False)


def _inner(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights that every pass of a head reads, in 16 bits; an embedding of its own is looked up."""
    return _blank({name: shape for name, shape in _shapes(weights).items() if name != "fc"})
