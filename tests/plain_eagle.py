"""A Llama target and EAGLE heads in plain torch, written from the published formulas: the second opinion of tests.

It reads the files of a head itself, by their published names, and recomputes everything for every token: no cache, no
pages, no network code of Paceline. Rows are [length, hidden].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

EPS = 1e-5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate x [length, heads, dim], whose rows are positions 0, 1, …"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(inputs: Tensor, get: Any, shape: Mapping[str, Any], window: int = 0) -> Tensor:
    """Causal attention of one layer, before its output projection; `get` finds `q_proj.weight` and the like."""
    heads, keys, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]

    def project(name: str, count: int) -> Tensor:
        bias = get(f"{name}_proj.bias")
        out = inputs @ get(f"{name}_proj.weight").T + (0 if bias is None else bias)
        out = out.view(len(inputs), count, dim)
        norm = get(f"{name}_norm.weight")
        return out if norm is None else rms(out, norm)

    theta = shape["rope_theta"]
    q, k = rotate(project("q", heads), theta), rotate(project("k", keys), theta)
    k, v = (x.repeat_interleave(heads // keys, dim=1) for x in (k, project("v", keys)))
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    back = torch.arange(len(inputs))[:, None] - torch.arange(len(inputs))
    seen = (back >= 0) & (back < (window or 1 << 30))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def layer(x: Tensor, inputs: Tensor, tensors: Mapping[str, Tensor], prefix: str, shape: Mapping[str, Any]) -> Tensor:
    """One decoder layer, whose attention reads `inputs` and whose residual stream is x."""
    window = shape.get("sliding_window", 0) if "sliding_attention" in (shape.get("layer_types") or ()) else 0
    attended = attention(inputs, lambda name: tensors.get(f"{prefix}self_attn.{name}"), shape, window)
    x = x + attended @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    normed = rms(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


class PlainTarget:
    """A Llama model of a directory."""

    def __init__(self, folder: Path) -> None:
        self.shape = json.loads((folder / "config.json").read_text())
        heads = self.shape["num_attention_heads"]
        self.shape = {"head_dim": self.shape["hidden_size"] // heads, "rope_theta": 1e4, **self.shape}
        found = load_file(str(folder / "model.safetensors"))
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
            more = rms(y[-1:], self.tensors["norm.weight"]) if self.values.get("norm_output") else y[-1:]
            g, following = torch.cat([g, more]), [*following, found[-1]]
        return found

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

    def _layers(self, g: Tensor, following: Sequence[int]) -> Tensor:
        embedded = rms(self.embedding[list(following)], self.tensors["layers.0.input_layernorm.weight"])
        normed = rms(g, self.tensors["layers.0.hidden_norm.weight"])
        first = self.values.get("norm_before_residual", "speculators_model_type" in self.values)
        x = layer(normed if first else g, torch.cat([embedded, normed], dim=1), self.tensors, "layers.0.", self.shape)
        for index in range(1, self.shape["num_hidden_layers"]):
            prefix = f"layers.{index}."
            x = layer(x, rms(x, self.tensors[f"{prefix}input_layernorm.weight"]), self.tensors, prefix, self.shape)
        return x

    def _token(self, y: Tensor) -> int:
        output = self.tensors.get("lm_head.weight", self.target.output)
        best = int((output @ rms(y, self.tensors["norm.weight"])).argmax())
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
