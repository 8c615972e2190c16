"""A block drafter in training: all rows of many blocks at once, each block after an anchor anywhere in an answer.

    context   c[j] = norm(fc(features[j]))                     keys and values of each layer, for the whole text
    block a   rows at p[a] … p[a] + B - 1: the token at p[a], then B - 1 masks
    row i     sees c[j] for j < p[a], and the B rows of its own block; no other block

With a markov head the layout is that of DSpark, anchor first: row i guesses the token at p + i + 1, and the head reads
the true token before it. Without one it is that of DFlash, fill-in: row i ≥ 1 guesses the token at p + i. A round of
drafting computes the same, as long as drafted tokens are right. Names and shapes of the weights are those of the
published formats; embedding and output layer are the target's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import RopeScaling
from paceline.models.rope import rope_frequencies, turns
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.fused import gated, norm, rotate
from paceline.train.storage import tensors_file
from paceline.train.students.eagle import scaling_entry
from paceline.train.students.labels import Aim, Labels, soft_loss
from paceline.train.students.packing import FUSION, Packing, packed, rounded_weights
from paceline.train.students.student import Losses, best_tokens, leaves

POSITION_DECAY = (
    0.8  # weight of a drafted token in the loss, relative to the one before: about how many drafts reach it
)
SCORED_ANCHORS = 64  # anchors of a text that are computed at a time where all of them are
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass(frozen=True, slots=True)
class BlockShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    taps: tuple[int, ...]  # layers of the target whose inputs are the features
    block: int  # rows
    markov: int  # rank of the markov head; 0: none
    mask_token: int
    eps: float
    theta: float
    max_context: int
    scaling: RopeScaling | None = None  # kept from a published drafter

    @property
    def first(self) -> int:
        """The first row that guesses a token."""
        return 0 if self.markov else 1

    def sizes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        markov = {W1: (self.vocab, self.markov), W2: (self.vocab, self.markov)} if self.markov else {}
        return {
            FUSION: (self.hidden, len(self.taps) * self.hidden),
            "hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
            **{f"layers.{index}.{name}": size for index in range(self.layers) for name, size in layer.items()},
            **markov,
        }


class BlockStudent:
    kind = "block"

    def __init__(
        self,
        shape: BlockShape,
        *,
        params: Mapping[str, Tensor],
        feature_scale: Tensor,
        dtype: torch.dtype,
        packing: Packing = "bf16",
    ) -> None:
        """`feature_scale` [features]: divisors of the features before `fc` in training; `files` folds them into the
        weights of `fc`."""
        self.shape = shape
        self.params = leaves(params, feature_scale.device)
        self.constants = {"feature_scale": feature_scale}
        self._dtype = dtype
        self._packing: Packing = packing
        self._frequencies = rope_frequencies(shape.head_dim, shape.theta, shape.scaling).to(feature_scale.device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        anchors, weights = self._anchors(texts), rounded_weights(self.params, self._packing, self._dtype)
        rows = self._rows(teacher, states, texts.ids, anchors, weights)[:, :, self.shape.first :]
        text = torch.arange(len(anchors), device=rows.device)[:, None].expand(anchors.shape).flatten()
        total, by_step, agreement = torch.zeros((), device=rows.device), [], []
        for step in range(rows.shape[2]):
            places = (anchors + step).flatten()  # of the token before the guess
            inside = places + 1 < texts.ends[text]  # rows beyond an answer are computed, and count for nothing:
            shares = inside / inside.sum().clamp_min(1)  # to choose the others would be to wait for the GPU
            places = places.clamp(max=texts.ids.shape[1] - 1)
            labels = Labels.of(states.hidden[text, places], teacher.head, aim)
            inputs = self._inputs(rows[:, :, step].flatten(0, 1), texts.ids[text, places], weights)
            loss, distance, best = soft_loss(self._logits(inputs, teacher, weights), labels, shares)
            total = total + loss * POSITION_DECAY**step
            by_step.append(distance)
            agreement.append(((best == labels.best) * shares).sum())
        return Losses(total=total, by_step=torch.stack(by_step), agreement=torch.stack(agreement))

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        weights, length = rounded_weights(self.params, self._packing, self._dtype), texts.ids.shape[1]
        found = torch.full((*texts.ids.shape, steps), -1, device=texts.ids.device)  # -1: no row guesses this step
        last = int(texts.ends.max()) - 1
        for start in range(int(texts.starts.min()), last, SCORED_ANCHORS):
            at = torch.arange(start, min(start + SCORED_ANCHORS, last), device=texts.ids.device)
            anchors = at.expand(len(texts.ids), -1)
            rows = self._rows(teacher, states, texts.ids, anchors, weights)[:, :, self.shape.first :]
            for step in range(min(steps, rows.shape[2])):
                before = texts.ids[:, (at + step).clamp(max=length - 1)]  # the last token that is guessed already
                inputs = self._inputs(rows[:, :, step].flatten(0, 1), before.flatten(), weights)
                best = best_tokens(inputs, lambda some: self._logits(some, teacher, weights))
                found[:, at - 1, step] = best.view(anchors.shape)
        return found

    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Do nothing: the files need only the parameters."""

    def files(self) -> dict[str, bytes]:
        tensors = {name: tensor.detach().cpu() for name, tensor in self.params.items()}
        tensors[FUSION] = tensors[FUSION] / self.constants["feature_scale"].cpu()
        return {
            "model.safetensors": tensors_file(packed(tensors, self._packing)),
            "config.json": (json.dumps(_config(self.shape), indent=1) + "\n").encode(),
        }

    def _anchors(self, texts: TextBatch) -> Tensor:
        """Draw positions of anchors [sequences, anchors] in the answers; all blocks together have about as many rows as
        the texts. The weights are the seed: a training that resumes has the same, and draws the same."""
        seed = self.params["norm.weight"].detach().view(torch.int32).sum(dtype=torch.int64)
        count = max(1, texts.ids.shape[1] // self.shape.block)
        shares = _uniform(seed, len(texts.ids) * count).view(-1, count)
        choices = (texts.ends - 1 - texts.starts).clamp_min(1)[:, None]  # the last token is followed by none
        return texts.starts[:, None] + (shares * choices).long().clamp(max=choices - 1)

    def _inputs(self, rows: Tensor, before: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Put the factor of the token before beside each row, where there is a markov head."""
        return torch.cat([rows, functional.embedding(before, weights[W1])], dim=-1) if self.shape.markov else rows

    def _logits(self, inputs: Tensor, teacher: Teacher, weights: Mapping[str, Tensor]) -> Tensor:
        logits = functional.linear(inputs[:, : self.shape.hidden], teacher.head)
        return logits + functional.linear(inputs[:, self.shape.hidden :], weights[W2]) if self.shape.markov else logits

    # ── the network ──

    def _rows(
        self, teacher: Teacher, states: TargetStates, ids: Tensor, anchors: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the outputs [sequences, anchors, B, hidden] after the last norm."""
        shape, (texts, count) = self.shape, anchors.shape
        scaled = states.features / self.constants["feature_scale"].to(self._dtype)
        context = self._norm(functional.linear(scaled, weights[FUSION]), weights["hidden_norm.weight"])
        tokens = torch.full((texts, count, shape.block), shape.mask_token, device=ids.device)
        tokens[:, :, 0] = ids.gather(1, anchors)
        at = (anchors[:, :, None] + torch.arange(shape.block, device=ids.device)).flatten(1)
        angles = turns(at.flatten(), self._frequencies)
        before = turns(torch.arange(ids.shape[1], device=ids.device).repeat(texts), self._frequencies)
        mask = block_mask(anchors, rows=shape.block, length=ids.shape[1])
        x = teacher.embed(tokens.flatten(1))
        for index in range(shape.layers):
            layer = {name.removeprefix(f"layers.{index}."): w for name, w in weights.items()}
            own = self._norm(x, layer["input_layernorm.weight"])
            queries = self._project(own, layer, "q", angles)
            sides = ((context, before), (own, angles))
            keys = torch.cat([self._project(side, layer, "k", turned) for side, turned in sides], dim=2)
            values = torch.cat([self._project(context, layer, "v"), self._project(own, layer, "v")], dim=2)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"])
            x = x + self._mlp(self._norm(x, layer["post_attention_layernorm.weight"]), layer)
        return self._norm(x, weights["norm.weight"]).view(texts, count, shape.block, -1)

    def _project(
        self, x: Tensor, layer: Mapping[str, Tensor], name: str, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Project x [sequences, rows, hidden] to [sequences, heads, rows, head_dim]; norm and rotate queries and keys.
        Keys and values are repeated for the queries that share them."""
        dim = self.shape.head_dim
        out = functional.linear(x, layer[f"self_attn.{name}_proj.weight"]).view(*x.shape[:2], -1, dim)
        if angles is not None:
            out = self._norm(out, layer[f"self_attn.{name}_norm.weight"])
            out = rotate(out.flatten(0, 1), *angles).view(out.shape)
        shared = 1 if name == "q" else self.shape.heads // self.shape.kv_heads
        return out.transpose(1, 2).repeat_interleave(shared, dim=1)

    def _mlp(self, x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return functional.linear(gated(functional.linear(x, gate), functional.linear(x, up)), down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]), weight, self.shape.eps).view(x.shape)


def _uniform(seed: Tensor, count: int) -> Tensor:
    """Hash `seed` to numbers from 0 to 1 [count]. A generator would have to wait for the seed: on a GPU that is until
    the step before has ended."""
    x = torch.arange(1, count + 1, device=seed.device) * -7046029254386353131 + seed  # 2**64 / golden ratio, odd
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # as in splitmix64
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).float() / (1 << 24)


def block_mask(anchors: Tensor, *, rows: int, length: int) -> Tensor:
    """Return a mask [sequences, 1, anchors * rows, length + anchors * rows], True where a row may attend: to positions
    before its anchor, and to the rows of its own block."""
    count = anchors.shape[1]
    before = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(rows, dim=1)[..., None]
    block = torch.arange(count * rows, device=anchors.device) // rows
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([before, own], dim=2)[:, None]


def _config(shape: BlockShape) -> dict[str, object]:
    ids = [tap - 1 for tap in shape.taps]  # of the layers that the states leave
    dspark = {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": shape.mask_token,
        "target_layer_ids": ids,
        "markov_rank": shape.markov,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    }
    dflash = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": shape.mask_token, "target_layer_ids": ids},
    }
    return {
        **(dspark if shape.markov else dflash),
        "model_type": "qwen3",
        "block_size": shape.block,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_context,
        "tie_word_embeddings": False,
        **({"rope_scaling": scaling_entry(shape.scaling)} if shape.scaling else {}),
    }
