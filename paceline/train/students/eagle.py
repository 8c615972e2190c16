"""An EAGLE-3 head in training: one layer over fused features of the target, unrolled over its own outputs.

Row p pairs the feature of position p with the embedding of token p + 1, and predicts token p + 2. Step 0 sees the true
features; at step s the row continues the chain that started at p - s, from the head's own output one row before:

    step 0   g[p] = fc(features[p])       keys: those of step 0 at rows ≤ p
    step s   g[p] = y of step s-1 at p-1   keys: those of step 0 at rows ≤ p - s, then one of each later step

A round of drafting computes the same, except that it reads drafted tokens where training reads the target's. The two
are equal as long as drafted tokens are right, and nothing after a wrong one counts. Names and shapes of the weights are
those of the published format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import RopeScaling
from paceline.models.eagle_config import LAYER_IDS, EagleConfig
from paceline.models.heads import SKETCH
from paceline.runner.heads.sketch import directions
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.storage import tensors_file
from paceline.train.students.chains import ChainLayer, chain_guesses, chain_losses, shifted
from paceline.train.students.labels import Aim, Labels
from paceline.train.students.packing import Packing, packed, rounded_weights
from paceline.train.students.student import Losses, label_rows, leaves


@dataclass(frozen=True, slots=True)
class EagleShape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # tokens of the target
    draft_vocab: int
    layers: tuple[int, ...]  # layers of the target whose inputs are the features
    eps: float
    theta: float
    max_context: int
    steps: int  # draft steps that training unrolls
    scaling: RopeScaling | None = None  # kept from a published head

    def sizes(self) -> dict[str, tuple[int, ...]]:
        wide, queries, keys = 2 * self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "fc.weight": (self.hidden, len(self.layers) * self.hidden),
            "midlayer.input_layernorm.weight": (self.hidden,),
            "midlayer.hidden_norm.weight": (self.hidden,),
            "midlayer.self_attn.q_proj.weight": (queries, wide),
            "midlayer.self_attn.k_proj.weight": (keys, wide),
            "midlayer.self_attn.v_proj.weight": (keys, wide),
            "midlayer.self_attn.o_proj.weight": (self.hidden, queries),
            "midlayer.post_attention_layernorm.weight": (self.hidden,),
            "midlayer.mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "midlayer.mlp.up_proj.weight": (self.intermediate, self.hidden),
            "midlayer.mlp.down_proj.weight": (self.hidden, self.intermediate),
            "norm.weight": (self.hidden,),
            "lm_head.weight": (self.draft_vocab, self.hidden),
        }


def shape_of_head(config: EagleConfig, *, steps: int) -> EagleShape:
    """Return the shape of a head that was read."""
    layer = config.decoder
    return EagleShape(
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab=layer.vocab_size,
        draft_vocab=config.draft_vocab_size,
        layers=config.taps,
        eps=layer.norm_eps,
        theta=layer.rope_theta,
        max_context=layer.max_context,
        steps=steps,
        scaling=layer.rope_scaling,
    )


class EagleStudent:
    kind = "eagle"

    def __init__(
        self,
        shape: EagleShape,
        *,
        params: Mapping[str, Tensor],
        draft_ids: Tensor,
        feature_scale: Tensor,
        dtype: torch.dtype,
        packing: Packing = "bf16",
    ) -> None:
        """`draft_ids` [draft vocab]: ids in the target's vocabulary, ascending. `feature_scale` [features]: divisors of
        the features before `fc` in training; `files` folds them into the weights of `fc`."""
        self.shape = shape
        device = feature_scale.device
        self.params = leaves(params, device)
        self.constants = {"draft_ids": draft_ids.to(device), "feature_scale": feature_scale}
        self.sketch: Tensor | None = None  # set by `finish`
        self._dtype = dtype
        self._packing: Packing = packing
        self._known = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
        self._known[self.constants["draft_ids"]] = True
        self._layer = ChainLayer.of(shape, "midlayer.", device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        rows = label_rows(texts, self._known)
        hidden = states.hidden.flatten(0, 1)[rows + 1]
        labels = Labels.of(hidden, teacher.head[self.constants["draft_ids"]], aim)
        weights = self._cast()
        outputs = self._unroll(teacher, states, texts, weights, self.shape.steps)
        return chain_losses(outputs, lambda y: self._logits(y, weights), labels, texts, rows)

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        weights = self._cast()
        outputs = self._unroll(teacher, states, texts, weights, steps)
        return chain_guesses(outputs, lambda y: self._logits(y, weights), texts, ids=self.constants["draft_ids"])

    @torch.no_grad()
    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Fit the sketch of the output layer to the inputs that the layer gets: drafters that compute only some of its
        outputs choose them by the sketch (`runner.heads.sketch`)."""
        weights, rows = self._cast(), 0
        moment = torch.zeros((self.shape.hidden, self.shape.hidden), device=self.constants["feature_scale"].device)
        for texts in batches:
            some = label_rows(texts, self._known)
            for y in self._unroll(teacher, teacher(texts.ids), texts, weights, self.shape.steps):
                x = self._norm(y.flatten(0, 1)[some].float(), torch.ones_like(moment[0]))
                moment += x.T @ x
                rows += len(x)
        parts = self.params["lm_head.weight"], self.params["norm.weight"], moment / max(rows, 1)
        self.sketch = directions(*(part.detach().float().cpu() for part in parts))

    def files(self) -> dict[str, bytes]:
        shape, ids = self.shape, self.constants["draft_ids"].cpu()
        tensors = {name: tensor.detach().cpu() for name, tensor in self.params.items()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.constants["feature_scale"].cpu()
        tables = {"d2t": (ids - torch.arange(len(ids))).int(), "t2d": self._known.cpu()}
        if self.sketch is not None:
            tables[SKETCH] = self.sketch
        return {
            "model.safetensors": tensors_file(packed(tensors, self._packing) | tables),
            "config.json": (json.dumps(_config(shape), indent=1) + "\n").encode(),
        }

    def _cast(self) -> dict[str, Tensor]:
        return rounded_weights(self.params, self._packing, self._dtype)

    def _unroll(
        self, teacher: Teacher, states: TargetStates, texts: TextBatch, weights: Mapping[str, Tensor], steps: int
    ) -> Iterator[Tensor]:
        """Yield the outputs y [sequences, length, hidden] of each step."""
        scaled = states.features / self.constants["feature_scale"].to(self._dtype)
        g = functional.linear(scaled, weights["fc.weight"])
        token = self._norm(teacher.embed(texts.ids.roll(-1, dims=1)), weights["midlayer.input_layernorm.weight"])
        chain = self._layer.begin(texts)
        for _ in range(steps):
            x = torch.cat([token, self._norm(g, weights["midlayer.hidden_norm.weight"])], dim=-1)
            y = self._layer(g, x, weights, chain)
            yield y
            g = shifted(y, 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._layer.norm(x, weight)

    def _logits(self, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(self._norm(y, weights["norm.weight"]), weights["lm_head.weight"])


def _config(shape: EagleShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_values(shape),
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.hidden,
        LAYER_IDS: list(shape.layers),
    }


def layer_values(shape: EagleShape) -> dict[str, object]:
    """Return what config.json says of the layer of a head."""
    stretched = {"rope_scaling": scaling_entry(shape.scaling)} if shape.scaling else {}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_context,
        "tie_word_embeddings": False,
        **stretched,
    }


def scaling_entry(scaling: RopeScaling) -> dict[str, object]:
    """Return the `rope_scaling` entry of config.json."""
    found: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return found
