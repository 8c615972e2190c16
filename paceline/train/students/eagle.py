"""The EAGLE-3 head as it learns: one layer over fused features of the target, unrolled over its own outputs.

Row p pairs the feature of position p with the embedding of token p + 1, and predicts token p + 2. Step 0 sees the true
features; at step s the row continues the chain that began at p - s, from the head's own output one row before:

    step 0   g[p] = fc(features[p])       keys: those of step 0 at rows ≤ p
    step s   g[p] = y of step s-1 at p-1   keys: those of step 0 at rows ≤ p - s, then one of each later step

This is what happens in a round, with the target's tokens for drafted ones: the same thing as long as they are right,
and nothing counts after one that is not. Names and shapes of the weights are those of the published format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import RopeScaling
from paceline.models.heads import SKETCH
from paceline.models.rope import rope_frequencies, turns
from paceline.runner.heads.sketch import directions
from paceline.train.data.batches import STEP, Texts
from paceline.train.data.labels import Labels, soft_loss
from paceline.train.output.packing import Packing, as_written, packed
from paceline.train.output.storage import tensors_file
from paceline.train.students.fused import gated, norm, shares, turn
from paceline.train.students.student import Losses, best_tokens, label_rows, leaves
from paceline.train.students.teacher import Insight, Teacher

OWN = STEP // 2  # columns of attention for the head's own keys: with them a row stays aligned
LATER = 0.8  # what a step counts, relative to the one before it: so often, about, a chain gets that far


@dataclass(frozen=True, slots=True)
class EagleShape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # of the target
    draft_vocab: int
    layers: tuple[int, ...]  # whose inputs are the features
    eps: float
    theta: float
    max_context: int
    steps: int  # unrolled
    scaling: RopeScaling | None = None  # a head that was published with one keeps it

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


class EagleHead:
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
        """`draft_ids` [draft vocab]: the target's ids, ascending. `feature_scale` [features]: what features are divided
        by before `fc` learns from them; the file has it folded into the weights."""
        self.shape = shape
        device = feature_scale.device
        self.params = leaves(params, device)
        self.constants = {"draft_ids": draft_ids.to(device), "feature_scale": feature_scale}
        self.sketch: Tensor | None = None  # for the file: see `study`
        self._dtype = dtype
        self._packing: Packing = packing
        self._known = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
        self._known[self.constants["draft_ids"]] = True
        self._frequencies = rope_frequencies(shape.head_dim, shape.theta, shape.scaling).to(device)

    def losses(self, teacher: Teacher, insight: Insight, texts: Texts) -> Losses:
        rows = label_rows(texts, self._known)
        first = (texts.starts - 1)[rows // texts.ids.shape[1]]  # the first row of the answer that each belongs to
        depth = rows % texts.ids.shape[1] - first  # how long a chain that ends here may be
        hidden = insight.hidden.flatten(0, 1)[rows + 1]
        labels = Labels.of(hidden, teacher.head[self.constants["draft_ids"]], teacher.aim)
        weights = self._cast()
        total, by_step, agreement = torch.zeros((), device=rows.device), [], []
        for step, y in enumerate(self._unroll(teacher, insight, texts, weights, self.shape.steps)):
            counts = (depth >= step).float()
            counts /= counts.sum().clamp_min(1.0)
            logits = self._logits(y.flatten(0, 1).index_select(0, rows), weights)
            loss, distance, best = soft_loss(logits, labels, counts)
            total = total + loss * LATER**step
            by_step.append(distance)
            agreement.append(((best == labels.best) * counts).sum())
        return Losses(total=total, by_step=torch.stack(by_step), agreement=torch.stack(agreement))

    @torch.no_grad()
    def guesses(self, teacher: Teacher, insight: Insight, texts: Texts, steps: int) -> Tensor:
        weights = self._cast()
        found = []
        for step, y in enumerate(self._unroll(teacher, insight, texts, weights, steps)):
            best = best_tokens(y.flatten(0, 1), lambda rows: self._logits(rows, weights))
            drafted = self.constants["draft_ids"][best].view(texts.ids.shape)
            found.append(drafted.roll(-step, dims=1))  # from the row where the chain is to the one where it began
        return torch.stack(found, dim=-1)

    @torch.no_grad()
    def study(self, teacher: Teacher, batches: Iterable[Texts]) -> None:
        """Find out how the rows before its last layer are spread, for whoever computes only some of its outputs."""
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
        """Matrices as they will be written, in the arithmetic's dtype, once a batch; gradients go back to float32."""
        written = {name: as_written(name, p, self._packing) for name, p in self.params.items()}
        return {name: p.to(self._dtype) if p.dim() == 2 else p for name, p in written.items()}

    def _unroll(
        self, teacher: Teacher, insight: Insight, texts: Texts, weights: Mapping[str, Tensor], steps: int
    ) -> Iterator[Tensor]:
        """The outputs y [sequences, length, hidden] of each step."""
        scaled = insight.features / self.constants["feature_scale"].to(self._dtype)
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
            g = later(y, 1)

    def _project(self, x: Tensor, weights: Mapping[str, Tensor], name: str, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[sequences, length, heads, head_dim], turned where it is a query or a key."""
        out = functional.linear(x, weights[f"midlayer.self_attn.{name}_proj.weight"])
        out = out.view(*x.shape[:2], -1, self.shape.head_dim)
        return out if name == "v" else turn(out.flatten(0, 1), *angles).view(out.shape)

    def _mlp(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return functional.linear(gated(functional.linear(x, gate), functional.linear(x, up)), down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]), weight, self.shape.eps).view(x.shape)

    def _logits(self, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return functional.linear(self._norm(y, weights["norm.weight"]), weights["lm_head.weight"])


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last of the steps so far, as the module describes; all [sequences, length, heads, head_dim].

    parts   [.., length, length + OWN]   of attention: of the keys of step 0, then of the row's own chain, oldest first
    """
    step, (sequences, length, kv_heads, dim) = len(keys) - 1, keys[0].shape
    q = (q * dim**-0.5).view(sequences, length, kv_heads, -1, dim)
    q = q.permute(0, 2, 3, 1, 4)  # [sequences, kv_heads, group, length, dim]
    flat = (sequences, kv_heads, q.shape[2] * length, -1)
    firsts = (q.reshape(flat) @ keys[0].permute(0, 2, 3, 1)).view(*q.shape[:-1], length)
    chain = [later(keys[i], step - i).transpose(1, 2)[:, :, None] for i in range(1, step + 1)]
    own = [(q * key).sum(dim=-1) for key in chain]
    own += [torch.zeros_like(firsts[..., 0])] * (OWN - step)
    parts = shares(firsts, torch.stack(own, dim=-1), _mask(length, step, like=firsts))
    on_firsts, on_own = torch.split(parts, [length, OWN], dim=-1)  # one gradient for both; slices would have one each
    out = (on_firsts.reshape(flat) @ values[0].transpose(1, 2)).view(q.shape)
    for i in range(1, step + 1):
        value = later(values[i], step - i).transpose(1, 2)[:, :, None]
        out = out + on_own[..., i - 1, None] * value
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def later(x: Tensor, rows: int) -> Tensor:
    """Each row gets what was `rows` before it; [sequences, length, ...]."""
    if not rows:
        return x
    return torch.cat([torch.zeros_like(x[:, :rows]), x[:, :-rows]], dim=1)


def _mask(length: int, step: int, *, like: Tensor) -> Tensor:
    """[length, length + OWN] zero where a row of this step may look, else minus infinity."""
    at = torch.arange(length, device=like.device)
    firsts = at[:, None] - step >= at
    own = (torch.arange(OWN, device=like.device) < step).expand(length, OWN)
    allowed = torch.cat([firsts, own], dim=1)
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)


def _config(shape: EagleShape) -> dict[str, object]:
    stretched = {"rope_scaling": _scaling(shape.scaling)} if shape.scaling else {}
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
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.layers)},
        **stretched,
    }


def _scaling(scaling: RopeScaling) -> dict[str, object]:
    """The kinds that a published config can have."""
    found: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return found
