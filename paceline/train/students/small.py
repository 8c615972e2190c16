"""A small Llama in training, distilled from the target: an ordinary model directory that `model:PATH` drafts with.

It reads only the text of the target, so it also drafts where no hidden states are available. Of all kinds it
needs the most training: it starts from random weights, and its embedding alone may have more weights than a head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.rope import rope_frequencies, turns
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.fused import gated, norm, rotate
from paceline.train.seeds import SMALL_STREAM, seeded_generator
from paceline.train.storage import tensors_file
from paceline.train.students.labels import Aim, Labels, soft_loss
from paceline.train.students.student import Losses, best_tokens, label_rows, leaves

INITIAL_STD = 0.02  # standard deviation of initial weights
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
HEAD_DIM = 64  # width of an attention head; narrower models have a single head


@dataclass(frozen=True, slots=True)
class SmallShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    vocab: int
    max_context: int
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        width = self.heads * self.head_dim
        for layer in (f"model.layers.{index}" for index in range(self.layers)):
            sizes |= {f"{layer}.self_attn.{name}_proj.weight": (width, self.hidden) for name in "qkv"}
            sizes |= {
                f"{layer}.input_layernorm.weight": (self.hidden,),
                f"{layer}.self_attn.o_proj.weight": (self.hidden, width),
                f"{layer}.post_attention_layernorm.weight": (self.hidden,),
                f"{layer}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{layer}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{layer}.mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return sizes | {"model.norm.weight": (self.hidden,)}


class SmallStudent:
    kind = "small"

    def __init__(
        self,
        shape: SmallShape,
        *,
        params: Mapping[str, Tensor],
        tokenizer: Mapping[str, bytes],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`tokenizer`: the target's tokenizer files, which complete the model directory."""
        self.shape = shape
        self.params = leaves(params, device)
        self.constants: dict[str, Tensor] = {}
        self._tokenizer = dict(tokenizer)
        self._dtype = dtype
        self._all = torch.ones(shape.vocab, dtype=torch.bool, device=device)
        self._frequencies = rope_frequencies(shape.head_dim, ROPE_THETA, None).to(device)

    @classmethod
    def new(
        cls, shape: SmallShape, *, tokenizer: Mapping[str, bytes], dtype: torch.dtype, device: torch.device, seed: int
    ) -> SmallStudent:
        random = seeded_generator(seed, SMALL_STREAM)
        params = {
            name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=random) * INITIAL_STD
            for name, size in shape.sizes().items()
        }
        return cls(shape, params=params, tokenizer=tokenizer, dtype=dtype, device=device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        """Loss over the rows p of `label_rows`: this model predicts token p + 2 at its row p + 1."""
        rows = label_rows(texts, self._all) + 1
        weights = self._cast()
        hidden = self._forward(texts.ids, weights).flatten(0, 1).index_select(0, rows)
        labels = Labels.of(states.hidden.flatten(0, 1)[rows], teacher.head, aim)
        counts = torch.full((len(rows),), 1 / max(1, len(rows)), device=rows.device)
        logits = functional.linear(hidden, weights["model.embed_tokens.weight"])
        loss, distance, best = soft_loss(logits, labels, counts)
        agreement = ((best == labels.best) * counts).sum()
        return Losses(total=loss, by_step=distance[None], agreement=agreement[None])

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        weights = self._cast()
        hidden = self._forward(texts.ids, weights).flatten(0, 1)
        best = best_tokens(hidden, lambda rows: functional.linear(rows, weights["model.embed_tokens.weight"]))
        best = best.view(texts.ids.shape)
        return torch.stack([best.roll(-1 - step, dims=1) for step in range(steps)], dim=-1)

    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Do nothing: the files need only the parameters."""

    def files(self) -> dict[str, bytes]:
        shape = self.shape
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_context,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": True,
            "eos_token_id": list(shape.eos_ids),
            "bos_token_id": shape.bos_id,
        }
        tensors = {
            name: t.detach().cpu().to(torch.bfloat16 if t.dim() == 2 else t.dtype) for name, t in self.params.items()
        }
        return {
            "model.safetensors": tensors_file(tensors),
            "config.json": (json.dumps(config, indent=1) + "\n").encode(),
            **self._tokenizer,
        }

    def _cast(self) -> dict[str, Tensor]:
        return {name: p.to(self._dtype) if p.dim() == 2 else p for name, p in self.params.items()}

    def _forward(self, ids: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute the hidden states after the last norm [sequences, length, hidden]."""
        x = functional.embedding(ids, weights["model.embed_tokens.weight"])
        angles = turns(torch.arange(ids.shape[1], device=ids.device).repeat(len(ids)), self._frequencies)
        for index in range(self.shape.layers):
            layer = {n: weights[f"model.layers.{index}.{n}.weight"] for n in _LAYER}
            x = x + self._attention(_norm(x, layer["input_layernorm"]), layer, angles)
            inner = _norm(x, layer["post_attention_layernorm"])
            gate, up = (functional.linear(inner, layer[f"mlp.{name}_proj"]) for name in ("gate", "up"))
            x = x + functional.linear(gated(gate, up), layer["mlp.down_proj"])
        return _norm(x, weights["model.norm.weight"])

    def _attention(self, x: Tensor, layer: Mapping[str, Tensor], angles: tuple[Tensor, Tensor]) -> Tensor:
        rows = (x.shape[0] * x.shape[1], self.shape.heads, self.shape.head_dim)
        q, k, v = (functional.linear(x, layer[f"self_attn.{name}_proj"]).view(rows) for name in "qkv")
        q, k = rotate(q, *angles), rotate(k, *angles)
        side = (*x.shape[:2], *rows[1:])
        q, k, v = (part.view(side).transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(out.transpose(1, 2).flatten(2), layer["self_attn.o_proj"])


_LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.reshape(-1, x.shape[-1]), weight, NORM_EPS).view(x.shape)
