"""An MTP head in training: one layer over the target's state after its last norm, unrolled over its own outputs.

    step 0   g[p] = the target's state at p            (`train.students.eagle` has rows and steps)
    step s   g[p] = z of step s-1 at p-1
    each     x = input_proj(norm(embedding of token p + 1) │ norm(g)), one usual layer, z = norm of its output

Embedding and output layer are the target's, and are not trained: logits = head(z) over the whole vocabulary. Names and
shapes of the weights are those of the `speculators` layout, and so is the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.mtp import LAYER, load_mtp
from paceline.models.mtp_forms import COUNT
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.storage import tensors_file
from paceline.train.students.chains import ChainLayer, chain_guesses, chain_losses, shifted
from paceline.train.students.eagle import EagleShape, layer_values, shape_of_head
from paceline.train.students.labels import Aim, Labels
from paceline.train.students.packing import MTP_FUSION, Packing, packed, rounded_weights
from paceline.train.students.student import Losses, label_rows, leaves

PREFIX = "mtp_layers.0."
NAMES = {  # name in `models.heads` → name in training and in files
    "fc": MTP_FUSION,
    "embed_norm": f"{PREFIX}token_layernorm.weight",
    "state_norm": f"{PREFIX}hidden_layernorm.weight",
    "layers.0.attn_norm": f"{PREFIX}input_layernorm.weight",
    **{f"layers.0.{name}": f"{PREFIX}self_attn.{name}_proj.weight" for name in "qkvo"},
    "layers.0.mlp_norm": f"{PREFIX}post_attention_layernorm.weight",
    **{f"layers.0.{name}": f"{PREFIX}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "norm": f"{PREFIX}final_layernorm.weight",
}


def sizes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter. Of `shape`, `layers` is the one tap after the target's last layer."""
    hidden, middle = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "fc": (hidden, 2 * hidden),
        "layers.0.q": (queries, hidden),
        "layers.0.k": (keys, hidden),
        "layers.0.v": (keys, hidden),
        "layers.0.o": (hidden, queries),
        "layers.0.gate": (middle, hidden),
        "layers.0.up": (middle, hidden),
        "layers.0.down": (hidden, middle),
    }
    return {published: matrices.get(name, (hidden,)) for name, published in NAMES.items()}


class MtpStudent:
    kind = "mtp"

    def __init__(
        self,
        shape: EagleShape,
        *,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing = "bf16",
    ) -> None:
        self.shape = shape
        self.params = leaves(params, device)
        self.constants: dict[str, Tensor] = {}
        self._dtype = dtype
        self._packing: Packing = packing
        self._all = torch.ones(shape.vocab, dtype=torch.bool, device=device)
        self._layer = ChainLayer.of(shape, PREFIX, device)

    @classmethod
    def read(cls, folder: Path, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> MtpStudent:
        """Read a head to measure it. One with other tensors than those that are trained is refused."""
        head = load_mtp(folder, target).in_format("fp32")
        other = sorted(head.weights.keys() ^ NAMES.keys())
        if other or head.config.flags:
            what = f"a difference in {other[0]}" if other else ", ".join(head.config.flags)
            raise UnsupportedModel(f"{folder}: an MTP head with {what} drafts, but is not trained or measured here")
        shape = shape_of_head(head.config, steps=1)
        weights = {name: weight for name, weight in head.weights.items() if isinstance(weight, Tensor)}
        return cls(shape, params={NAMES[name]: weight for name, weight in weights.items()}, dtype=dtype, device=device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        rows = label_rows(texts, self._all)
        labels = Labels.of(states.hidden.flatten(0, 1)[rows + 1], teacher.head, aim)
        outputs = self._unroll(teacher, states, texts, self.shape.steps)
        return chain_losses(outputs, lambda z: functional.linear(z, teacher.head), labels, texts, rows)

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        outputs = self._unroll(teacher, states, texts, steps)
        return chain_guesses(outputs, lambda z: functional.linear(z, teacher.head), texts)

    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Do nothing: the files need only the parameters."""

    def files(self) -> dict[str, bytes]:
        tensors = {name: tensor.detach().cpu() for name, tensor in self.params.items()}
        return {
            "model.safetensors": tensors_file(packed(tensors, self._packing)),
            "config.json": (json.dumps(_config(self.shape), indent=1) + "\n").encode(),
        }

    def _unroll(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Iterator[Tensor]:
        """Yield the normed outputs z [sequences, length, hidden] of each step."""
        weights, norm = rounded_weights(self.params, self._packing, self._dtype), self._layer.norm
        token = norm(teacher.embed(texts.ids.roll(-1, dims=1)), weights[f"{PREFIX}token_layernorm.weight"])
        g, chain = states.hidden, self._layer.begin(texts)
        for _ in range(steps):
            state = norm(g, weights[f"{PREFIX}hidden_layernorm.weight"])
            x = functional.linear(torch.cat([token, state], dim=-1), weights[MTP_FUSION])
            y = self._layer(x, norm(x, weights[f"{PREFIX}input_layernorm.weight"]), weights, chain)
            z = norm(y, weights[f"{PREFIX}final_layernorm.weight"])
            yield z
            g = shifted(z, 1)


def _config(shape: EagleShape) -> dict[str, object]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.steps}
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        COUNT: 1,
        LAYER: {**layer_values(shape), "num_hidden_layers": shape.layers[0]},
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
    }
