"""Forms in which multi-token prediction (MTP) modules are published: names of their tensors, and keys of their configs.

A form says how tensors are called, and in which order `fc` reads embedding and state. Whether its network runs here is
another question: `MtpForm.lacks` names what Paceline does not compute yet. Tensors and sizes are not read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.errors import UnsupportedModel
from paceline.models.fields import Fields

COUNT = "num_nextn_predict_layers"  # the usual key with the number of modules


@dataclass(frozen=True, slots=True)
class MtpForm:
    family: str  # for messages
    tensors: str  # beginning of the names of its tensors; {layers} stands for the number of the target's layers
    names: Mapping[str, str]  # what follows `tensors` in published names → names of `models.heads`, by their beginnings
    counts: tuple[str, ...] = (COUNT,)  # keys of config.json that may have the number of modules
    hidden_first: bool = False  # fc reads [state, embedding], not [embedding, state]
    model_types: tuple[str, ...] = ()  # values of `model_type` that alone have this form
    lacks: str | None = None  # what its network needs and Paceline does not compute; None: it runs

    def prefixes(self, layers: int) -> dict[str, str]:
        """Map the beginnings of published names of the first module to those of `models.heads`, for HeadTensors."""
        start = self.tensors.format(layers=layers)
        return {start + published: name for published, name in self.names.items()}


MODULES = {  # one folder of tensors for each module
    "0.token_layernorm.": "embed_norm.",
    "0.hidden_layernorm.": "state_norm.",
    "0.input_proj.": "fc.",
    "0.final_layernorm.": "norm.",
    "0.": "layers.0.",
}
QWEN = {
    "pre_fc_norm_embedding.": "embed_norm.",
    "pre_fc_norm_hidden.": "state_norm.",
    "fc.": "fc.",
    "norm.": "norm.",
    "layers.": "layers.",
}
EXTRA_LAYER = {
    "enorm.": "embed_norm.",
    "hnorm.": "state_norm.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
    "": "layers.0.",
}
GEMMA = {"pre_projection.": "fc.", "post_projection.": "carry.", "model.": ""}
MINIMAX = {
    "layers.0.enorm.": "embed_norm.",
    "layers.0.hnorm.": "state_norm.",
    "layers.0.eh_proj.": "fc.",
    "layers.0.final_layernorm.": "norm.",
    "layers.0.transformer_layer.": "layers.0.",
}

MIMO = MtpForm("MiMo", "model.mtp_layers.", MODULES, hidden_first=True)
SPECULATORS = MtpForm("speculators mtp", "mtp_layers.", MODULES)
STITCHED = MtpForm("stitched speculators mtp", "mtp.", QWEN, counts=(COUNT, "mtp_num_hidden_layers"))
RUNNING = (MIMO, SPECULATORS, STITCHED)
EXPERTS = "a mixture of experts"
OTHERS = (  # forms of architectures that do not run here
    MtpForm(
        "DeepSeek V3",
        "model.layers.{layers}.",
        EXTRA_LAYER,
        model_types=("deepseek_v3", "deepseek_v32"),
        lacks=f"latent attention and {EXPERTS}",
    ),
    MtpForm(
        "GLM-4.5",
        "model.layers.{layers}.",
        EXTRA_LAYER,
        model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        lacks=EXPERTS,
    ),
    MtpForm("Qwen3-Next", "mtp.", QWEN, model_types=("qwen3_next",), lacks=f"{EXPERTS} and norms by 1 + weight"),
    MtpForm(
        "Qwen3.5",
        "mtp.",
        QWEN,
        counts=("mtp_num_hidden_layers",),
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        lacks="gated attention and norms by 1 + weight",
    ),
    MtpForm(  # whole checkpoints have `language_model.` before all names
        "MiniMax-M3",
        "model.mtp.",
        MINIMAX,
        counts=("num_mtp_modules",),
        model_types=("minimax_m3", "minimax_m3_vl"),
        lacks=f"sparse attention, {EXPERTS} and norms by 1 + weight",
    ),
    MtpForm(
        "Gemma 4 assistant",
        "",
        GEMMA,
        counts=(),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        lacks="attention over the target's own keys and values",
    ),
)
OWN_COUNTS = tuple(dict.fromkeys(key for form in RUNNING for key in form.counts))
COUNTS = tuple(dict.fromkeys([*OWN_COUNTS, *(key for form in OTHERS for key in form.counts)]))


def is_mtp(name: str) -> bool:
    """Tell whether a tensor of a checkpoint belongs to MTP modules, and not to the target itself."""
    return name.startswith(tuple(form.tensors for form in RUNNING))


def form_of(names: Iterable[str]) -> MtpForm | None:
    """Find the form of the tensors of a directory; None: it has no tensors of MTP modules."""
    some = list(names)
    return next((form for form in RUNNING if any(name.startswith(form.tensors) for name in some)), None)


def declared(fields: Fields) -> str | None:
    """Return the key of config.json that says that there are MTP modules; None: it says that there are none."""
    return next((key for key in COUNTS if fields.get(key)), None)


def refuse_others(fields: Fields) -> None:
    """Raise UnsupportedModel, with the name of the form, for modules of an architecture that does not run here."""
    places = (fields, fields.inner("text_config"), fields.inner("transformer_layer_config"))
    types = [place.get("model_type") for place in places]
    for form in OTHERS:
        keys = [key for key in form.counts if key not in OWN_COUNTS]
        foreign = any(place.get(key) for key in keys for place in places)
        if foreign or any(kind in form.model_types for kind in types):
            raise UnsupportedModel(
                f"{fields.source}: an MTP head of the form {form.family!r} needs {form.lacks}, which Paceline does not "
                f"compute yet; it runs those of {', '.join(known.family for known in RUNNING)}"
            )
