"""The config of a block drafter: what its network computes, read from every layout in which they are published.

`BlockConfig` is the one description of the network. The last committed token, at position p, is the *anchor*:

    context   c_j = norm(fc(hidden states of the target at position j, side by side)), for every j < p
              each layer makes keys and values straight from c_j: no norm, no queries, no MLP
    block     B rows at p … p + B - 1: the embedding of the anchor, then B - 1 times that of `mask_token`
              a row attends to the context and to the whole block; in a causal layer to no later row of the block
    layout    fill-in        row i ≥ 1 guesses the token at p + i         B - 1 drafted tokens
              anchor first   row i guesses the token at p + i + 1         B drafted tokens
    DFlash    logits = head(norm(y))
    DSpark    a bias by the token before it is added to the logits of a row; it may tell its own confidence
    DFlash2   convolutions over the block around attention and MLP; tokens are chosen among the best of each row

A config with a feature that is not listed here raises UnsupportedModel. Tensors are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.errors import InvalidRequest, UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.eagle_config import LAYERS, MAX_LAYERS, SIZES, check_target, layer_types, layer_windows
from paceline.models.fields import Fields
from paceline.models.hf_config import config_from_hf
from paceline.models.speculators_config import TYPE, published_notes

Kind = Literal["DFlash", "DSpark", "DFlash2"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
ARCHITECTURES: dict[str, Kind] = {
    "DFlashDraftModel": "DFlash",
    "DFlashSpeculator": "DFlash",
    "Qwen3DSparkModel": "DSpark",
    "DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "DFlash2DraftModel": "DFlash2",
    "DFlash2Speculator": "DFlash2",
}
SPECULATORS: dict[str, Kind] = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
RELATIVES = {"xpress": "XPress", "lilicorr": "LiLiCorr", "domino": "Domino"}  # in names or keys → heads not read
REFUSED: dict[str, tuple[object, str]] = {  # key → the value that changes nothing, and what other values ask for
    "attention_sink_bias": (False, "attention sinks"),
    "add_swa_attention_sink_bias": (False, "attention sinks"),
    "attention_value_scale": (1, "scaled attention values"),
    "is_neox_style": (True, "rotation of adjacent dimensions"),
    "draft_ffn_type": ("dense", "mixture of experts"),
    "dspark_backbone_conv_enabled": (False, "convolutions in a DSpark backbone"),
    "draft_adapter_rank": (0, "an adapter before the output layer"),
    "use_aux_hidden_state": (True, "drafting without hidden states"),
    "pure_draft_prefix_len": (1, "tokens of a block without its head"),
}
CONFIDENCE = ("enable_confidence_head", "use_confidence_head")  # two names of one flag
ALIKE = (  # further pairs of keys that mean the same
    CONFIDENCE,
    ("output_multiplier", "logit_scale"),
    ("sample_from_anchor", "shift_label"),
    ("is_causal", "causal"),
)
OUTPUT_IDS, INPUT_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
MAX_BLOCK = 256  # rows


@dataclass(frozen=True, slots=True)
class Markov:
    """The head of DSpark: a bias of rank `rank` by the token before."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class Convolutions:
    """The convolutions of DFlash2, over `taps` rows, with a kernel for each `group` of channels."""

    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class Selector:
    """The choice of DFlash2 among the `top` best tokens of a row, by factors of rank `rank`."""

    rank: int
    top: int


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The network of a block drafter; the module's docstring has the formulas."""

    decoder: ModelConfig  # config of its layers; `vocab_size` is the target's
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]  # places of the target whose hidden states it reads, in the order of fc's inputs
    block_size: int  # rows
    mask_token: int
    kind: Kind = "DFlash"
    anchor_first: bool = False
    causal: tuple[bool, ...] = ()  # layers whose rows see no later row of the block; (): none
    markov: Markov | None = None
    confidence: Literal["states", "states and tokens"] | None = None  # what its own confidence is computed from
    convolutions: Convolutions | None = None
    selector: Selector | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # logits are softcap * tanh(logits / softcap); 0: as they are
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)  # what its publisher says of its use

    @property
    def width(self) -> int:
        """Columns of the features, all taps together."""
        return len(self.taps) * self.target_hidden_size

    @property
    def longest(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - (not self.anchor_first)

    def rows_for(self, tokens: int) -> int:
        """Return the rows to compute for a draft of `tokens`: all of the block where a row sees later ones, because it
        was trained so."""
        whole = not (self.causal and all(self.causal))
        return self.block_size if whole else tokens + (not self.anchor_first)

    @property
    def flags(self) -> tuple[str, ...]:
        """Name what a user may want to know of the network."""
        windows = {window for window in self.decoder.windows if window}
        found = (
            f"{self.decoder.num_layers} layers",
            f"blocks of {self.block_size}{', anchor first' if self.anchor_first else ''}",
            f"a {self.markov.kind} markov head of rank {self.markov.rank}" if self.markov else None,
            "its own confidence" if self.confidence else None,
            f"a choice of {self.selector.top}" if self.selector else None,
            f"a window of {max(windows)}" if windows else None,
        )
        return tuple(flag for flag in found if flag)


def is_block(values: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of a block drafter, or of a relative that is refused by name."""
    names = _names(values)
    known = any(name in ARCHITECTURES or name in SPECULATORS for name in names)
    return known or _relative(values) is not None


def block_config(values: Mapping[str, Any], target: ModelConfig, *, source: str) -> BlockConfig:
    fields = _merged(values, source)
    kind = _kind(fields)
    _refuse(fields)
    layers = fields.inner(LAYERS[0])
    for key in (*SIZES, "block_size", "mask_token_id") if layers.values else ():
        fields.agree(key, layers, key, inside=LAYERS[0])
    inner = Fields(layers.values or fields.values, source=source)
    decoder, causal = _decoder(inner, fields, kind)
    check_target(
        fields.integer("target_hidden_size", decoder.hidden_size, high=1 << 17), decoder.vocab_size, target, source
    )
    config = BlockConfig(
        decoder=decoder,
        draft_vocab_size=fields.integer("draft_vocab_size", decoder.vocab_size, high=decoder.vocab_size),
        target_hidden_size=target.hidden_size,
        taps=_taps(fields, target),
        block_size=_block_size(fields, decoder, target),
        mask_token=fields.integer("mask_token_id", low=0, high=decoder.vocab_size - 1),
        kind=kind,
        anchor_first=_anchor_first(fields, kind),
        causal=causal,
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        logit_scale=fields.number("output_multiplier", fields.number("logit_scale", 1.0)),
        softcap=fields.number("final_logit_softcapping", 0.0, low=0.0),
        notes=published_notes(fields, target),
    )
    if config.longest < 1:
        raise fields.error("block_size", "is 1, of which nothing is drafted; allowed: 2 or more, or sample_from_anchor")
    return _with_selector(_with_markov(config, fields), fields)


# ── which kind ──


def _merged(values: Mapping[str, Any], source: str) -> Fields:
    """Return the fields with those of `dflash_config` beside them; raise if a key has two values."""
    outer = Fields(values, source=source)
    inner = outer.inner("dflash_config")
    for key in inner.values:
        outer.agree(key, inner, key, inside="dflash_config")
    given = {key: value for key, value in inner.values.items() if value is not None}
    fields = Fields({**values, **given}, source=source)
    for key, other in ALIKE:
        fields.agree(key, fields, other)
    return fields


def _names(values: Mapping[str, Any]) -> list[str]:
    names = values.get("architectures")
    first = names[:1] if isinstance(names, list) else []
    return [str(name) for name in (values.get(TYPE), *first) if name is not None]


def _relative(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find a head on the same backbone that is not read: its name, and where the config says so."""
    inner = values.get("dflash_config")
    every = {**values, **(inner if isinstance(inner, Mapping) else {})}
    said = [*_names(values), str(every.get("projector_type") or ""), *(key for key in every if every[key])]
    return next(((RELATIVES[part], one) for one in said for part in RELATIVES if part in str(one).lower()), None)


def _kind(fields: Fields) -> Kind:
    relative = _relative(fields.values)
    if relative is not None:
        raise UnsupportedModel(
            f"{fields.source}: {relative[1]!r:.100} asks for a head of {relative[0]}, which Paceline does not read; "
            f"supported: {', '.join(get_args(Kind))}"
        )
    names = _names(fields.values)
    speculators = fields.get(TYPE)
    kind = SPECULATORS.get(names[0]) if speculators is not None else ARCHITECTURES.get(names[0] if names else "")
    if kind is None:
        raise UnsupportedModel(
            f"{fields.source}: {', '.join(names)!r:.100} is no block drafter; supported: {', '.join(ARCHITECTURES)}, "
            f"or a speculators_model_type of {', '.join(SPECULATORS)}; an EAGLE head is given as eagle:PATH"
        )
    return kind


def _refuse(fields: Fields) -> None:
    """Refuse what no network here computes, by the name of its key."""
    for key, (usual, feature) in REFUSED.items():
        if fields.get(key) not in (None, usual):
            raise UnsupportedModel(f"{fields.source}: uses {feature} ({key}), which Paceline does not know")


def _anchor_first(fields: Fields, kind: Kind) -> bool:
    """Read the layout. DSpark's own checkpoints do not say it: they begin with the anchor. `dspark_bonus_anchor`, of
    checkpoints converted for vLLM, is the opposite of `sample_from_anchor`."""
    default = kind == "DSpark" and fields.get(TYPE) is None
    bonus = fields.get("dspark_bonus_anchor")
    if bonus is not None:
        default = not fields.flag("dspark_bonus_anchor", False)
    first = fields.flag("sample_from_anchor", fields.flag("shift_label", default))
    if bonus is not None and first is not default:
        raise fields.error("dspark_bonus_anchor", f"is {bonus}, the opposite of what sample_from_anchor must be")
    return first


# ── layers ──


def _decoder(inner: Fields, fields: Fields, kind: Kind) -> tuple[ModelConfig, tuple[bool, ...]]:
    """Read the config of the layers, which are those of Qwen3, and which of them are causal inside the block."""
    if inner.get("rope_theta") is None and inner.inner("rope_parameters").get("rope_theta") is None:
        raise inner.error("rope_theta", "is missing, and nothing else tells how positions were rotated in training")
    count = inner.integer("num_hidden_layers", high=MAX_LAYERS)
    replaced = ("layer_types", "final_logit_softcapping")
    shape = {
        **{key: value for key, value in inner.values.items() if key not in replaced},
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    types = layer_types(inner, count)
    causal = _causal([each == "sliding_attention" for each in types], fields, kind)
    if fields.flag("use_swa", False) and "sliding_attention" not in types:
        types = ["sliding_attention"] * count
    window = fields.get("swa_window_size") or inner.get("sliding_window")
    said = Fields({"layer_types": types, "sliding_window": window}, source=inner.source)
    return replace(config_from_hf(shape, source=inner.source), windows=layer_windows(said, count)), causal


def _causal(sliding: list[bool], fields: Fields, kind: Kind) -> tuple[bool, ...]:
    """Tell which layers are causal inside the block: by default those that `layer_types` gives a window."""
    for key in ("is_causal", "causal"):
        if fields.get(key) is not None:
            return (fields.flag(key, False),) * len(sliding)
    both_ways = kind == "DFlash2" and fields.get(TYPE) is not None
    if fields.flag("sliding_window_non_causal", both_ways):
        return (False,) * len(sliding)
    return tuple(sliding)


def _block_size(fields: Fields, decoder: ModelConfig, target: ModelConfig) -> int:
    size = fields.integer("block_size", high=MAX_BLOCK)
    longest = min(decoder.max_context, target.max_context)
    if size > longest:
        raise fields.error("block_size", f"is {size}, longer than a context of {longest} tokens")
    return size


# ── taps ──


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the taps. `target_layer_ids` name the layer that a state leaves, `aux_hidden_state_layer_ids` the layer
    that it enters; the tap n + 1 of n layers is the state that leaves the last one (`kernels.base`)."""
    layers, published = target.num_layers, fields.integer("num_target_layers", target.num_layers)
    if published != layers:
        raise InvalidRequest(
            f"{fields.source}: num_target_layers is {published}, the target has {layers} layers; take a drafter that "
            "was trained for this target"
        )
    inputs = _entered(fields, INPUT_IDS, 0, layers) if fields.get(INPUT_IDS) is not None else None
    outputs = _entered(fields, OUTPUT_IDS, -1, layers) if inputs is None or fields.get(OUTPUT_IDS) is not None else None
    if inputs and outputs and inputs != outputs:
        raise fields.error(INPUT_IDS, f"is {inputs}, but {OUTPUT_IDS} is {outputs} by that count; keep the right one")
    return tuple(layers + 1 if tap == layers else tap for tap in inputs or outputs or ())


def _entered(fields: Fields, key: str, first: int, layers: int) -> list[int]:
    """Read ids that count from `first`, as layers that a state enters."""
    given, last = fields.get(key), layers + first
    if not isinstance(given, list) or not given or not all(type(i) is int and first <= i <= last for i in given):
        raise fields.error(key, f"is {given!r:.100}; needed: a list of the target's layers, from {first} to {last}")
    return [layer - first for layer in given]


# ── heads ──


def _with_markov(config: BlockConfig, fields: Fields) -> BlockConfig:
    rank = fields.integer("markov_rank", 0, low=0, high=1 << 14)
    kind = fields.text("markov_head_type", "vanilla")
    kinds: dict[str, MarkovKind] = {name: name for name in get_args(MarkovKind)}
    if rank and kind not in kinds:
        raise UnsupportedModel(f"{fields.source}: markov_head_type {kind!r:.50}; supported: {', '.join(kinds)}")
    markov = Markov(kinds[kind], rank) if rank else None
    if not fields.flag(CONFIDENCE[0], fields.flag(CONFIDENCE[1], False)):
        return replace(config, markov=markov)
    tokens = fields.flag("confidence_head_with_markov", False)
    if tokens and markov is None:
        raise fields.error("confidence_head_with_markov", "is true, but there is no markov head (markov_rank)")
    return replace(config, markov=markov, confidence="states and tokens" if tokens else "states")


def _with_selector(config: BlockConfig, fields: Fields) -> BlockConfig:
    if config.kind != "DFlash2":
        return config
    if config.markov is not None:
        raise UnsupportedModel(
            f"{fields.source}: DFlash2 with a markov head (markov_rank), which Paceline does not know"
        )
    if config.confidence is not None:
        raise UnsupportedModel(
            f"{fields.source}: DFlash2 with a confidence head ({CONFIDENCE[0]}), which Paceline does not know"
        )
    hidden = config.decoder.hidden_size
    group = fields.integer("conv_group_size", 16, high=hidden)
    if hidden % group:
        raise fields.error("conv_group_size", f"is {group}; allowed: divisors of the hidden size {hidden}")
    return replace(
        config,
        convolutions=Convolutions(taps=fields.integer("conv_kernel_size", 2, high=config.block_size), group=group),
        selector=Selector(
            rank=fields.integer("selector_rank", 256, high=1 << 14),
            top=fields.integer("selector_top_k", 16, high=config.draft_vocab_size),
        ),
    )
