"""The config of an EAGLE head: what its network computes, read from every layout in which heads are published.

`EagleConfig` is the one description of the network; torch, the compiled program and the CUDA kernels all follow it. At
position i a head combines a state g with the embedding of token i + 1 and guesses token i + 2:

    EAGLE-3   f = hidden states of the target at the taps, side by side; normed if `feature_norms`
              g = fc f for the target's states, or the y of the position before, normed if `norm_output`
              x = g + attention(norm(embedding) │ norm(g)); with `norm_first` x begins with norm(g)
    EAGLE-1   g = the target's last state, or the y of the position before
              x = fc(embedding │ g), and attention reads x itself, without a norm
    MTP       g = the target's last state, or the y of the position before, normed
              x = fc(norm(embedding) │ norm(g)), and a usual layer reads x
    all       y = x + mlp(norm(x)), through further layers if there are some; logits = head(norm(y)), in EAGLE-1 head(y)

P-EAGLE is EAGLE-3, but a drafted position has no y before it: its token is `mask_token`, and its f is a stored vector.
So all tokens of a draft come from one pass. EAGLE-2 differs from EAGLE-1 by its trees, not by its network.

A config with a feature that is not listed here raises UnsupportedModel. Tensors are not read here; configs of MTP heads
are read in `models.mtp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.errors import InvalidRequest, UnsupportedModel, VocabularyMismatch
from paceline.models.config import ModelConfig
from paceline.models.fields import Fields
from paceline.models.hf_config import PARALLEL, config_from_hf
from paceline.models.speculators_config import TYPE, published_notes

Kind = Literal["EAGLE-1", "EAGLE-3", "P-EAGLE", "MTP"]
ARCHITECTURES: dict[str, Kind] = {
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3LlamaForCausalLM": "EAGLE-3",
    "Qwen3ForCausalLMEagle3": "EAGLE-3",
    "Eagle3Qwen3ForCausalLM": "EAGLE-3",
    "Eagle3Speculator": "EAGLE-3",
    "Eagle3DraftModel": "EAGLE-3",
    "PEagleSpeculator": "P-EAGLE",
    "PEagleDraftModel": "P-EAGLE",
    "EagleLlamaForCausalLM": "EAGLE-1",
    "LlamaForCausalLMEagle": "EAGLE-1",
    "EagleSpeculator": "EAGLE-1",
}
SPECULATORS: dict[str, Kind] = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
QWEN3 = ("Qwen3ForCausalLMEagle3", "Eagle3Qwen3ForCausalLM")  # their layers norm queries and keys
LAYERS = ("transformer_layer_config", "model")  # keys under which the config of the layers may stand
SIZES = (  # keys of that config that may stand at the top level, too
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "sliding_window", "layer_types"),
)
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "parallel_drafting")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", *PARALLEL)  # names of the token of drafted positions
MAX_LAYERS = 16
# The keys of config.json in heads that Paceline trained before it wrote LAYER_IDS at the top level. Their ids in
# `eagle_config` are taps; in the heads of others, under the same key, the tap is one more.
OWN_KEYS = {
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "vocab_size", "draft_vocab_size"),
    *("max_position_embeddings", "target_hidden_size", "tie_word_embeddings", "eagle_config"),
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The network of a head; the module's docstring has the formulas."""

    decoder: ModelConfig  # config of its layers; `vocab_size` is the target's
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]  # places of the target whose hidden states it reads, in the order of fc's inputs
    kind: Kind = "EAGLE-3"
    norm_first: bool = False  # the residual stream begins with norm(g), not with g
    feature_norms: int = 0  # norms of the features before fc: 0, 1 over all of them, or one for each tap
    norm_output: bool = False  # the next position gets norm(y), not y
    mask_token: int | None = None  # token of drafted positions in P-EAGLE
    modules: int = 1  # modules of MTP in the file; the first drafts every token
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)  # what its publisher says of its use

    @property
    def width(self) -> int:
        """Columns of the features, all taps together."""
        return len(self.taps) * self.target_hidden_size

    @property
    def fuses_tokens(self) -> bool:
        """Whether fc reads the embedding and a state, at every position (EAGLE-1, MTP)."""
        return self.kind in ("EAGLE-1", "MTP")

    @property
    def state_norm(self) -> str | None:
        """Name the weights of the norm of g; None: neither g nor the embedding has a norm."""
        return {"EAGLE-1": None, "MTP": "state_norm"}.get(self.kind, "layers.0.attn_norm")

    @property
    def usual_layers(self) -> bool:
        """Whether the first layer is one like any other: its attention reads the norm of its input."""
        return self.kind == "MTP"

    @property
    def fc_inputs(self) -> int:
        return 2 * self.decoder.hidden_size if self.fuses_tokens else self.width

    @property
    def flags(self) -> tuple[str, ...]:
        """Name what differs from an EAGLE-3 head of one layer, for users."""
        norms = {0: None, 1: "norm_before_fc"}.get(self.feature_norms, "fc_norm")
        layers, windows = self.decoder.num_layers, [window for window in self.decoder.windows if window]
        found = (
            f"{layers} layers" if layers > 1 else None,
            norms,
            "norm_before_residual" if self.norm_first else None,
            "norm_output" if self.norm_output and self.kind != "MTP" else None,
            "q and k norms" if self.decoder.qk_norm else None,
            f"a window of {windows[0]}" if windows else None,
            f"the first of {self.modules} modules" if self.modules > 1 else None,
        )
        return tuple(flag for flag in found if flag)


def eagle_config(
    values: Mapping[str, Any], target: ModelConfig, *, source: str, has: Callable[[str], bool] = lambda name: False
) -> EagleConfig:
    """Read a config. `has` tells whether the head's file has a tensor, by the name of `models.heads`."""
    fields = Fields(values, source=source)
    for key in FLAGS:
        fields.agree(key, fields.inner("eagle_config"), key, inside="eagle_config")
    kind = _kind(fields, fused=has("fc.weight"))
    decoder = _decoder(fields, has)
    config = EagleConfig(
        decoder=decoder,
        draft_vocab_size=fields.integer("draft_vocab_size", decoder.vocab_size, high=decoder.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size, high=1 << 17),
        taps=(target.num_layers,) if kind == "EAGLE-1" else _taps(fields, target),
        kind=kind,
        norm_first=_flag(fields, "norm_before_residual", fields.get(TYPE) is not None),
        norm_output=_flag(fields, "norm_output", False),
        mask_token=_mask_token(fields, decoder.vocab_size) if kind == "P-EAGLE" else None,
        notes=published_notes(fields, target),
    )
    config = _with_feature_norms(config, fields)
    _check_kind(config, fields)
    size = decoder.hidden_size if config.fuses_tokens else config.target_hidden_size
    check_target(size, decoder.vocab_size, target, source)
    return config


def _kind(fields: Fields, *, fused: bool) -> Kind:
    name = _architecture(fields)
    speculators = fields.get(TYPE)
    kind = ARCHITECTURES.get(str(name)) if speculators is None else SPECULATORS.get(str(speculators))
    if kind is None and speculators is None and (fields.get("model_type") == "eagle" or (_is_plain(name) and fused)):
        kind = "EAGLE-1"  # published under the name of its one decoder layer; `fc` tells it from a whole model
    if kind is None:
        hint = "an MTP head loads as mtp:PATH; " if speculators == "mtp" else ""
        raise UnsupportedModel(
            f"{fields.source}: {speculators or name!r:.100} is no EAGLE head; {hint}supported: "
            f"{', '.join(ARCHITECTURES)}, or a speculators_model_type of {', '.join(SPECULATORS)}"
        )
    parallel = _flag(fields, "parallel_drafting", kind == "P-EAGLE")
    if parallel is (kind == "P-EAGLE"):
        return kind
    if kind != "EAGLE-3":
        raise UnsupportedModel(
            f"{fields.source}: a head of {kind} with parallel_drafting {str(parallel).lower()}, which Paceline does "
            "not know; allowed: true in P-EAGLE, either in EAGLE-3, false in EAGLE-1"
        )
    return "P-EAGLE"


def _architecture(fields: Fields) -> object:
    names = fields.get("architectures") or []
    return names[0] if isinstance(names, list) and names else None


def _is_plain(name: object) -> bool:
    return name in ("LlamaForCausalLM", "Qwen2ForCausalLM")


def _check_kind(config: EagleConfig, fields: Fields) -> None:
    """Refuse what no network here computes, by the name of its key."""
    if fields.inner("eagle_config").flag("use_aux_hidden_state", True) is False:
        raise UnsupportedModel(f"{fields.source}: a head on the last hidden state alone (use_aux_hidden_state false)")
    if not config.fuses_tokens:
        return
    for key in ("layernorms", "add_para_norm", "norm_output", "norm_before_fc", "fc_norm", "norm_before_residual"):
        if _flag(fields, key, False):
            raise UnsupportedModel(f"{fields.source}: an EAGLE-1 head with {key}, which Paceline does not know")
    if fields.integer("truncated_vocab_size", config.decoder.vocab_size) != config.decoder.vocab_size:
        raise UnsupportedModel(f"{fields.source}: a vocabulary that truncated_vocab_size cuts; publish it with d2t")


def _flag(fields: Fields, key: str, default: bool) -> bool:
    """Read a flag at the top level, or inside of `eagle_config`."""
    return fields.flag(key, fields.inner("eagle_config").flag(key, default))


def _with_feature_norms(config: EagleConfig, fields: Fields) -> EagleConfig:
    whole, each = _flag(fields, "norm_before_fc", False), _flag(fields, "fc_norm", False)
    if whole and each:
        raise fields.error("norm_before_fc", "and fc_norm are both true; a head has one of them")
    count = 1 if whole else len(config.taps) if each else 0
    first = config.norm_first and not config.fuses_tokens
    return replace(config, feature_norms=count, norm_first=first)


# ── layers ──


def _decoder(fields: Fields, has: Callable[[str], bool]) -> ModelConfig:
    """Read the config of the head's layers: those of Llama, or of Qwen3 with norms of queries and keys."""
    values = _layer_values(fields)
    inner = Fields(values, source=fields.source)
    qwen = inner.get("model_type") == "qwen3" and fields.get(TYPE) is not None
    normed = qwen or _architecture(fields) in QWEN3 or has("layers.0.self_attn.q_norm.weight")
    count = inner.integer("num_hidden_layers", 1, high=MAX_LAYERS)
    shape = {
        "rms_norm_eps": 1e-5,
        **{key: value for key, value in values.items() if key != "layer_types"},
        "architectures": ["Qwen3ForCausalLM" if normed else "LlamaForCausalLM"],
        "num_hidden_layers": count,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    if normed and "head_dim" not in values:
        shape["head_dim"] = max(1, inner.integer("hidden_size") // inner.integer("num_attention_heads"))
    said = Fields({**values, "layer_types": layer_types(inner, count)}, source=fields.source)
    return replace(config_from_hf(shape, source=fields.source), windows=layer_windows(said, count))


def _layer_values(fields: Fields) -> Mapping[str, Any]:
    """Return the config of the layers, from a key of its own or from the top level; raise if both contradict."""
    key = next((key for key in LAYERS if fields.inner(key).values), None)
    if key is None:
        return fields.values
    for size in SIZES:
        fields.agree(size, fields.inner(key), size, inside=key)
    return fields.inner(key).values


def layer_types(fields: Fields, count: int) -> list[Any]:
    """Return `layer_types`, or what Qwen3's config makes of its other fields."""
    given = fields.get("layer_types")
    if given is not None:
        return given if isinstance(given, list) else [given]
    first = fields.integer("max_window_layers", 28, low=0) if fields.flag("use_sliding_window", False) else count
    return ["full_attention" if index < first else "sliding_attention" for index in range(count)]


def layer_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Read the sliding window of each layer; (): none has one."""
    types = fields.get("layer_types")
    if types is None:
        return ()
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        raise fields.error("layer_types", f"is {types!r:.100}; allowed: {layers} of {' and '.join(known)}")
    if "sliding_attention" not in types:
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


# ── taps ──


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the taps. Ids at the top level name the layer that a state enters, those of `eagle_config` the layer that
    it leaves; the tap n + 1 of n layers is the state that leaves the last one (`kernels.base`)."""
    layers = target.num_layers
    outer, inner = _ids(fields, 0, layers), _ids(fields.inner("eagle_config"), -1, layers - 1)
    if inner is not None and not _is_own(fields):
        inner = [layer + 1 for layer in inner]
    if outer and inner and outer != inner:
        raise fields.error(
            LAYER_IDS,
            f"is {outer}, but eagle_config names outputs of layers that are {inner} by that count; keep the right one",
        )
    found = outer or inner or [2, layers // 2, layers - 3]
    if not all(0 <= tap <= layers for tap in found):
        raise fields.error(LAYER_IDS, f"is missing, and the usual {found} do not fit a target of {layers} layers")
    return tuple(layers + 1 if tap == layers else tap for tap in found)


def _ids(fields: Fields, low: int, high: int) -> list[int] | None:
    given = fields.get(LAYER_IDS)
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(i) is int and low <= i <= high for i in given):
        raise fields.error(LAYER_IDS, f"is {given!r:.100}; allowed: layers of the target, from {low} to {high}")
    if not 1 <= len(given) <= high - low + 1:
        raise fields.error(LAYER_IDS, f"has {len(given)} layers; allowed: 1 to {high - low + 1} of this target")
    return given


def _is_own(fields: Fields) -> bool:
    """Tell whether Paceline wrote the config, when it still wrote taps into `eagle_config`."""
    return set(fields.values) - {"rope_scaling"} == OWN_KEYS and [*fields.inner("eagle_config").values] == [LAYER_IDS]


# ── checks ──


def _mask_token(fields: Fields, vocab: int) -> int:
    key = next((key for key in MASK_KEYS if fields.get(key) is not None), MASK_KEYS[0])
    return fields.integer(key, low=0, high=vocab - 1)


def check_target(size: int, vocab: int, target: ModelConfig, source: str) -> None:
    """Raise if its sizes of hidden states and vocabulary show that a head was trained for another target."""
    if size != target.hidden_size:
        raise InvalidRequest(
            f"{source}: a head for hidden states of size {size}, the target's have {target.hidden_size}; take a head "
            f"that was trained for this target (hidden_size or target_hidden_size {target.hidden_size})"
        )
    if vocab != target.vocab_size:
        raise VocabularyMismatch(
            f"{source}: a head for a vocabulary of {vocab}, the target's has {target.vocab_size}; "
            f"take a head that was trained for this target (vocab_size {target.vocab_size})"
        )
