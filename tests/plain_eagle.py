"""A Llama target and EAGLE heads in plain torch, written from the published formulas: the second opinion of tests.

It reads the files of a head itself, by their published names, and recomputes everything for every token: no cache, no
pages, no network code of Paceline. Rows are [length, hidden].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

EPS = 1e-5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


class Rows(NamedTuple):
    """The rows of a pass: those of a text, or of all its drafts at once, to train on them. All tensors are [rows]."""

    positions: Tensor
    turns: Tensor  # 0: a row with a true state; n: the n-th drafted row after one

    @classmethod
    def of(cls, length: int, turns: int = 1) -> Rows:
        """Rows 0 … length - 1, and `turns` - 1 drafted rows after each of them."""
        at, turn = torch.arange(length).repeat(turns), torch.arange(turns).repeat_interleave(length)
        return cls(at + turn, turn)

    def seen(self, window: int) -> Tensor:
        """Rows that each row attends to, [rows, rows]: true ones up to where its draft began, and its own draft."""
        began = self.positions - self.turns
        true = (self.turns == 0) & (self.positions <= began[:, None])
        own = (began == began[:, None]) & (self.turns <= self.turns[:, None])
        return (true | own) & (self.positions[:, None] - self.positions < (window or 1 << 30))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [length, heads, dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(inputs: Tensor, rows: Rows, get: Any, shape: Mapping[str, Any], window: int) -> Tensor:
    """Causal attention of one layer, before its output projection; `get` finds `q_proj.weight` and the like."""
    heads, keys, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]

    def project(name: str, count: int) -> Tensor:
        bias = get(f"{name}_proj.bias")
        out = inputs @ get(f"{name}_proj.weight").T + (0 if bias is None else bias)
        out = out.view(len(inputs), count, dim)
        norm = get(f"{name}_norm.weight")
        return out if norm is None else rms(out, norm)

    theta = shape["rope_theta"]
    q, k = (rotate(project(name, count), rows.positions, theta) for name, count in (("q", heads), ("k", keys)))
    k, v = (x.repeat_interleave(heads // keys, dim=1) for x in (k, project("v", keys)))
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    weights = scores.masked_fill(~rows.seen(window), -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def layer(
    x: Tensor,
    inputs: Tensor,
    tensors: Mapping[str, Tensor],
    prefix: str,
    shape: Mapping[str, Any],
    rows: Rows | None = None,
) -> Tensor:
    """One decoder layer, whose attention reads `inputs` and whose residual stream is x."""
    rows = rows or Rows.of(len(x))
    window = shape.get("sliding_window", 0) if "sliding_attention" in (shape.get("layer_types") or ()) else 0
    attended = attention(inputs, rows, lambda name: tensors.get(f"{prefix}self_attn.{name}"), shape, window)
    x = x + attended @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    normed = rms(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


@torch.no_grad()
def adam(param: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, rate: float = 5e-3) -> None:
    """One step of Adam; torch's own takes seconds to import."""
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.001)
    param -= rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)


def fit(params: Sequence[Tensor], loss: Callable[[], Tensor], *, steps: int, rate: float = 5e-3) -> None:
    """Fit parameters, in place."""
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]
    for step in range(1, steps + 1):
        gradients = torch.autograd.grad(loss(), params)
        for param, gradient, (mean, square) in zip(params, gradients, moments, strict=True):
            adam(param, gradient, mean, square, step, rate)


class PlainTarget:
    """A model of a directory: Llama, Qwen2 with biases, or Qwen3 with norms of queries and keys."""

    def __init__(self, folder: Path) -> None:
        self.shape = json.loads((folder / "config.json").read_text())
        heads = self.shape["num_attention_heads"]
        self.shape = {"head_dim": self.shape["hidden_size"] // heads, "rope_theta": 1e4, **self.shape}
        found = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(str(file)).items()}
        self.tensors = {name.removeprefix("model."): tensor.float() for name, tensor in found.items()}
        self.embedding = self.tensors["embed_tokens.weight"]
        self.output = self.tensors.get("lm_head.weight", self.embedding)

    def states(self, tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The stream that enters each layer and leaves the last one; and the state after the last norm."""
        x = self.embedding[list(tokens)]
        entering = [x]
        for index in range(self.shape["num_hidden_layers"]):
            prefix = f"layers.{index}."
            x = layer(x, rms(x, self.tensors[f"{prefix}input_layernorm.weight"]), self.tensors, prefix, self.shape)
            entering.append(x)
        return entering, rms(x, self.tensors["norm.weight"])


class PlainHead:
    """A head of a directory: EAGLE-3 with all its flags, P-EAGLE, or EAGLE-1."""

    def __init__(self, folder: Path, target: PlainTarget) -> None:
        self.values = json.loads((folder / "config.json").read_text())
        found = load_file(str(folder / "model.safetensors"))
        names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in found}
        names = {old: new.replace("transformer.", "layers.0.").replace("fusion_fc", "fc") for old, new in names.items()}
        self.tensors = {names[name]: tensor.float() for name, tensor in found.items()}
        inner = self.values.get("transformer_layer_config") or self.values.get("model") or self.values
        self.shape = {"num_hidden_layers": 1, "rope_theta": 1e4, **inner}
        self.target = target
        self.embedding = self.tensors.get("embed_tokens.weight", target.embedding)

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy draft after these tokens."""
        states, last = self.target.states(tokens[:-1])
        if "norm.weight" not in self.tensors:
            return self._fused_draft(tokens, last, count)
        g = self._fuse(torch.cat([states[place] for place in self._places(len(states) - 1)], dim=1))
        following = list(tokens[1:])
        if "mask_hidden" in self.tensors:
            mask = self._fuse(self.tensors["mask_hidden"].view(1, -1)).expand(count - 1, -1)
            following += [self.values["mask_token_id"]] * (count - 1)
            y = self._layers(torch.cat([g, mask]), following)
            return [self._token(row) for row in y[-count:]]
        found: list[int] = []
        for _ in range(count):
            y = self._layers(g, following)
            found.append(self._token(y[-1]))
            g, following = torch.cat([g, self.carried(y[-1:])]), [*following, found[-1]]
        return found

    def train(self, tokens: Sequence[int], *, turns: int, steps: int) -> None:
        """Fit the head to one text: to all drafts of `turns` tokens that begin in it."""
        params = [tensor.requires_grad_() for tensor in self.tensors.values() if tensor.dtype == torch.float32]
        states, _ = self.target.states(tokens)
        features = torch.cat([states[place] for place in self._places(len(states) - 1)], dim=1)
        fit(params, lambda: self._loss(features, list(tokens), turns), steps=steps)
        self.tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}

    def _loss(self, features: Tensor, tokens: list[int], turns: int) -> Tensor:
        count = len(tokens) - 1 - turns  # rows with true states from which whole drafts begin
        wanted = [token for turn in range(turns) for token in tokens[2 + turn : 2 + turn + count]]
        following = [token for turn in range(turns) for token in tokens[1 + turn : 1 + turn + count]]
        g = self._fuse(features[:count])
        if "mask_hidden" in self.tensors:
            mask = self._fuse(self.tensors["mask_hidden"].view(1, -1)).expand(count * (turns - 1), -1)
            following[count:] = [self.values["mask_token_id"]] * len(mask)
            y = self._layers(torch.cat([g, mask]), following, Rows.of(count, turns))
            return torch.nn.functional.cross_entropy(self.logits(y), torch.tensor(wanted))
        for turn in range(1, turns + 1):
            y = self._layers(g, following[: turn * count], Rows.of(count, turn))
            g = torch.cat([g, self.carried(y[-count:])])
        return torch.nn.functional.cross_entropy(self.logits(y), torch.tensor(wanted))

    def carried(self, y: Tensor) -> Tensor:
        """The state of the position after y."""
        return rms(y, self.tensors["norm.weight"]) if self.values.get("norm_output") else y

    def logits(self, y: Tensor) -> Tensor:
        output = self.tensors.get("lm_head.weight", self.target.output)
        return rms(y, self.tensors["norm.weight"]) @ output.T

    def _places(self, layers: int) -> list[int]:
        ids = self.values.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None:
            return list(ids)
        inner = (self.values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return [2, layers // 2, layers - 3] if inner is None else [place + 1 for place in inner]

    def _fuse(self, features: Tensor) -> Tensor:
        if self.values.get("norm_before_fc"):
            features = rms(features, self.tensors["input_norm.weight"])
        if self.values.get("fc_norm"):
            parts = features.chunk(features.shape[1] // self.target.shape["hidden_size"], dim=1)
            features = torch.cat([rms(p, self.tensors[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=1)
        return features @ self.tensors["fc.weight"].T

    def _layers(self, g: Tensor, following: Sequence[int], rows: Rows | None = None) -> Tensor:
        embedded = rms(self.embedding[list(following)], self.tensors["layers.0.input_layernorm.weight"])
        normed = rms(g, self.tensors["layers.0.hidden_norm.weight"])
        first = self.values.get("norm_before_residual", "speculators_model_type" in self.values)
        inputs = torch.cat([embedded, normed], dim=1)
        x = layer(normed if first else g, inputs, self.tensors, "layers.0.", self.shape, rows)
        for index in range(1, self.shape["num_hidden_layers"]):
            prefix = f"layers.{index}."
            inputs = rms(x, self.tensors[f"{prefix}input_layernorm.weight"])
            x = layer(x, inputs, self.tensors, prefix, self.shape, rows)
        return x

    def _token(self, y: Tensor) -> int:
        best = int(self.logits(y).argmax())
        return best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best

    def _fused_draft(self, tokens: Sequence[int], states: Tensor, count: int) -> list[int]:
        """EAGLE-1: fc reads the embedding and the state, at every position."""
        following, found = list(tokens[1:]), list[int]()
        for _ in range(count):
            pairs = torch.cat([self.embedding[following], states], dim=1)
            x = pairs @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", torch.zeros(1))
            y = layer(x, x, self.tensors, "layers.0.", self.shape)
            output = self.tensors.get("lm_head.weight", self.target.output)
            found.append(int((output @ y[-1]).argmax()))
            states, following = torch.cat([states, y[-1:]]), [*following, found[-1]]
        return found
