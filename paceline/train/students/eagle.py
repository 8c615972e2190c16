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
from paceline.models.eagle_config import LAYER_IDS
from paceline.models.heads import SKETCH
from paceline.models.rope import rope_frequencies, turns
from paceline.runner.heads.sketch import directions
from paceline.train.data.batches import LENGTH_MULTIPLE, TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.fused import attention_weights, gated, norm, rotate
from paceline.train.storage import tensors_file
from paceline.train.students.labels import Aim, Labels, soft_loss
from paceline.train.students.packing import Packing, as_written, packed
from paceline.train.students.student import Losses, best_tokens, label_rows, leaves

OWN_COLUMNS = LENGTH_MULTIPLE // 2  # attention columns for keys of the chain itself; they keep rows aligned
STEP_DECAY = 0.8  # weight of a step in the loss, relative to the step before: about the share of chains that reach it


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
        self._frequencies = rope_frequencies(shape.head_dim, shape.theta, shape.scaling).to(device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        rows = label_rows(texts, self._known)
        first = (texts.starts - 1)[rows // texts.ids.shape[1]]  # first row of the answer
        depth = rows % texts.ids.shape[1] - first  # steps of the longest chain that ends at the row
        hidden = states.hidden.flatten(0, 1)[rows + 1]
        labels = Labels.of(hidden, teacher.head[self.constants["draft_ids"]], aim)
        weights = self._cast()
        total, by_step, agreement = torch.zeros((), device=rows.device), [], []
        for step, y in enumerate(self._unroll(teacher, states, texts, weights, self.shape.steps)):
            counts = (depth >= step).float()
            counts /= counts.sum().clamp_min(1.0)
            logits = self._logits(y.flatten(0, 1).index_select(0, rows), weights)
            loss, distance, best = soft_loss(logits, labels, counts)
            total = total + loss * STEP_DECAY**step
            by_step.append(distance)
            agreement.append(((best == labels.best) * counts).sum())
        return Losses(total=total, by_step=torch.stack(by_step), agreement=torch.stack(agreement))

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        weights = self._cast()
        found = []
        for step, y in enumerate(self._unroll(teacher, states, texts, weights, steps)):
            best = best_tokens(y.flatten(0, 1), lambda rows: self._logits(rows, weights))
            drafted = self.constants["draft_ids"][best].view(texts.ids.shape)
            found.append(drafted.roll(-step, dims=1))  # from the row of the guess to the first row of its chain
        return torch.stack(found, dim=-1)

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
        """Return the weights of one batch: matrices rounded as in the file, in the dtype of the arithmetic. Gradients
        reach the float32 parameters."""
        written = {name: as_written(name, p, self._packing) for name, p in self.params.items()}
        return {name: p.to(self._dtype) if p.dim() == 2 else p for name, p in written.items()}

    def _unroll(
        self, teacher: Teacher, states: TargetStates, texts: TextBatch, weights: Mapping[str, Tensor], steps: int
    ) -> Iterator[Tensor]:
        """Yield the outputs y [sequences, length, hidden] of each step."""
        scaled = states.features / self.constants["feature_scale"].to(self._dtype)
        g = functional.linear(scaled, weights["fc.weight"])
        token = self._norm(teacher.embed(texts.ids.roll(-1, dims=1)), weights["midlayer.input_layernorm.weight"])
        positions = torch.arange(texts.ids.shape[1], device=g.device).repeat(len(texts.ids))
        angles = turns(positions, self._frequencies)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(steps):
            x = torch.cat([token, self._norm(g, weights["midlayer.hidden_norm.weight"])], dim=-1)
            q, k, v = (self._project(x, weights, name, angles) for name in "qkv")
            keys.append(k)
            values.append(v)
            mixed = attend(q, keys, values).flatten(-2)
            x = g + functional.linear(mixed, weights["midlayer.self_attn.o_proj.weight"])
            y = x + self._mlp(self._norm(x, weights["midlayer.post_attention_layernorm.weight"]), weights)
            yield y
            g = shifted(y, 1)

    def _project(self, x: Tensor, weights: Mapping[str, Tensor], name: str, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Project x to [sequences, length, heads, head_dim]; rotate queries and keys."""
        out = functional.linear(x, weights[f"midlayer.self_attn.{name}_proj.weight"])
        out = out.view(*x.shape[:2], -1, self.shape.head_dim)
        return out if name == "v" else rotate(out.flatten(0, 1), *angles).view(out.shape)

    def _mlp(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return functional.linear(gated(functional.linear(x, gate), functional.linear(x, up)), down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]), weight, self.shape.eps).view(x.shape)

    def _logits(self, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(self._norm(y, weights["norm.weight"]), weights["lm_head.weight"])


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Compute attention of the newest step; all tensors are [sequences, length, heads, head_dim].

    weights   [.., length, length + OWN_COLUMNS]   keys of step 0, then keys of the row's own chain, oldest first
    """
    step, (sequences, length, kv_heads, dim) = len(keys) - 1, keys[0].shape
    q = (q * dim**-0.5).view(sequences, length, kv_heads, -1, dim)
    q = q.permute(0, 2, 3, 1, 4)  # [sequences, kv_heads, group, length, dim]
    flat = (sequences, kv_heads, q.shape[2] * length, -1)
    firsts = (q.reshape(flat) @ keys[0].permute(0, 2, 3, 1)).view(*q.shape[:-1], length)
    chain = [shifted(keys[i], step - i).transpose(1, 2)[:, :, None] for i in range(1, step + 1)]
    own = [(q * key).sum(dim=-1) for key in chain]
    own += [torch.zeros_like(firsts[..., 0])] * (OWN_COLUMNS - step)
    weights = attention_weights(firsts, torch.stack(own, dim=-1), _mask(length, step, like=firsts))
    on_firsts, on_own = torch.split(weights, [length, OWN_COLUMNS], dim=-1)  # one gradient; slices have one each
    out = (on_firsts.reshape(flat) @ values[0].transpose(1, 2)).view(q.shape)
    for i in range(1, step + 1):
        value = shifted(values[i], step - i).transpose(1, 2)[:, :, None]
        out = out + on_own[..., i - 1, None] * value
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def shifted(x: Tensor, rows: int) -> Tensor:
    """Move the rows of x [sequences, length, ...] by `rows` towards the end; the first ones become zero."""
    if not rows:
        return x
    return torch.cat([torch.zeros_like(x[:, :rows]), x[:, :-rows]], dim=1)


def _mask(length: int, step: int, *, like: Tensor) -> Tensor:
    """Return a mask [length, length + OWN_COLUMNS]: 0 where a row of this step may attend, else minus infinity."""
    at = torch.arange(length, device=like.device)
    firsts = at[:, None] - step >= at
    own = (torch.arange(OWN_COLUMNS, device=like.device) < step).expand(length, OWN_COLUMNS)
    allowed = torch.cat([firsts, own], dim=1)
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)


def _config(shape: EagleShape) -> dict[str, object]:
    stretched = {"rope_scaling": scaling_entry(shape.scaling)} if shape.scaling else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "max_position_embeddings": shape.max_context,
        "target_hidden_size": shape.hidden,
        "tie_word_embeddings": False,
        LAYER_IDS: list(shape.layers),
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
