"""Block drafters in plain torch, written from the published formulas: the second opinion of tests.

It reads the files itself, by their published names, and recomputes everything for every draft: no cache, no pages, no
network code of Paceline. The block is always whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.plain_eagle import PlainTarget, rms, rotate


class PlainBlock:
    """A block drafter of a directory: DFlash in both layouts, DSpark, or DFlash2."""

    def __init__(self, folder: Path, target: PlainTarget) -> None:
        values = json.loads((folder / "config.json").read_text())
        self.values = {**values, **values.get("dflash_config", {})}
        self.shape = self.values.get("transformer_layer_config") or self.values
        found = load_file(str(folder / "model.safetensors"))
        self.tensors = {name.removeprefix("model."): tensor.float() for name, tensor in found.items()}
        self.target = target
        self.embedding = self.tensors.get("embed_tokens.weight", target.embedding)
        self.output = self.tensors.get("lm_head.weight", target.output)
        size = len(self.output)
        self.ids = torch.arange(size) + self.tensors.get("d2t", torch.zeros(size)).long()
        first = "DSpark" in values["architectures"][0] and "speculators_model_type" not in values
        self.anchor_first = self.values.get("sample_from_anchor", first)

    def draft(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Draft greedily after the tokens; also return the drafter's own confidence in each token, if it has one."""
        states = self.states(tokens)[0 if self.anchor_first else 1 :]
        before, found, sure, memory = (
            tokens[-1],
            list[int](),
            list[float](),
            torch.zeros(self.values.get("markov_rank", 0)),
        )
        for h in states[:count]:
            logits = self.output @ h * self.values.get("output_multiplier", 1.0)
            if cap := self.values.get("final_logit_softcapping"):
                logits = (logits / cap).tanh() * cap
            if "markov_rank" in self.values:
                bias, memory, confidence = self.markov(h, before, memory)
                logits = logits + bias
                sure += confidence
            best = int(self.choice(logits, h, before)) if "selector_rank" in self.values else int(logits.argmax())
            before = int(self.ids[best])
            found.append(before)
        return found, sure

    def states(self, tokens: Sequence[int]) -> Tensor:
        """States of all rows of the block after the last norm."""
        entering, _ = self.target.states(tokens)
        ids = self.values.get("aux_hidden_state_layer_ids") or [i + 1 for i in self.values["target_layer_ids"]]
        taps = torch.cat([entering[i][:-1] for i in ids], dim=1)
        context = rms(taps @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"])
        block = [tokens[-1], *[self.values["mask_token_id"]] * (self.values["block_size"] - 1)]
        x = self.embedding[block] * self.values.get("input_embedding_scale", 1.0)
        for index in range(self.shape["num_hidden_layers"]):
            x = self.layer(x, context, index)
        return rms(x, self.tensors["norm.weight"])

    def layer(self, x: Tensor, context: Tensor, index: int) -> Tensor:
        def get(name: str) -> Tensor:
            return self.tensors[f"layers.{index}.{name}.weight"]

        def convolved(name: str, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
            if "conv_group_size" not in self.values:
                return inputs, None
            projection = inputs @ get(f"{name}.kernel_projection").T
            kernels = projection.view(len(x), 2, self.values["conv_kernel_size"], -1)
            return self.convolve(f"layers.{index}.{name}", inputs, kernels, 0), kernels

        inputs, kernels = convolved("attention_conv", rms(x, get("input_layernorm")))
        out = self.attention(inputs, context, index)
        x = x + (out if kernels is None else self.convolve(f"layers.{index}.attention_conv", out, kernels, 1))
        inputs, kernels = convolved("mlp_conv", rms(x, get("post_attention_layernorm")))
        gate, up, down = (get(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        out = (torch.nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
        return x + (out if kernels is None else self.convolve(f"layers.{index}.mlp_conv", out, kernels, 1))

    def convolve(self, name: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        base, group = self.tensors[f"{name}.base_kernel"], self.values["conv_group_size"]
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(row + 1, self.values["conv_kernel_size"])):
                by_group = torch.arange(x.shape[1]) // group
                out[row] += (base[side, tap] + kernels[row, side, tap][by_group]) * x[row - tap]
        return out

    def attention(self, x: Tensor, context: Tensor, index: int) -> Tensor:
        heads, keys, dim = (self.shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        length, rows = len(context), len(x)

        def project(name: str, inputs: Tensor, count: int) -> Tensor:
            prefix = f"layers.{index}.self_attn.{name}"
            bias = self.tensors.get(f"{prefix}_proj.bias", torch.zeros(1))
            out = (inputs @ self.tensors[f"{prefix}_proj.weight"].T + bias).view(len(inputs), count, dim)
            return out if name == "v" else rms(out, self.tensors[f"{prefix}_norm.weight"])

        whole = torch.cat([context, x])
        at = torch.arange(length + rows)
        q = rotate(project("q", x, heads), at[length:], self.shape["rope_theta"])
        k = rotate(project("k", whole, keys), at, self.shape["rope_theta"]).repeat_interleave(heads // keys, dim=1)
        v = project("v", whole, keys).repeat_interleave(heads // keys, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        weights = scores.masked_fill(~self.seen(at, length, index), -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        bias = self.tensors.get(f"layers.{index}.self_attn.o_proj.bias", torch.zeros(1))
        return out @ self.tensors[f"layers.{index}.self_attn.o_proj.weight"].T + bias

    def seen(self, at: Tensor, length: int, index: int) -> Tensor:
        """Positions [rows, length + rows] that each row of the block attends to."""
        types = self.shape.get("layer_types")
        slides = types is not None and types[index] == "sliding_attention"
        causal = slides and not self.values.get("sliding_window_non_causal", False)
        for key in ("causal", "is_causal"):
            causal = self.values.get(key, causal)
        window = self.values.get("swa_window_size", self.shape.get("sliding_window"))
        back = at[length:, None] - at
        seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
        return seen & (back.abs() < window) if slides or self.values.get("use_swa") else seen

    def markov(self, h: Tensor, before: int, memory: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        def product(name: str, x: Tensor) -> Tensor:
            return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", torch.zeros(1))

        e = self.tensors["markov_head.markov_w1.weight"][before]
        kind, factor = self.values.get("markov_head_type", "vanilla"), e
        if kind == "gated":
            factor = product("markov_head.gate_proj", torch.cat([h, e])).sigmoid() * e
        if kind == "rnn":
            gate, candidate, out = product("markov_head.joint_proj", torch.cat([memory, e, h])).chunk(3)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            factor = out.tanh()
        sure = []
        if self.values.get("enable_confidence_head"):
            inputs = torch.cat([h, e]) if self.values.get("confidence_head_with_markov") else h
            sure.append(float(product("confidence_head.proj", inputs).sigmoid()))
        return self.tensors["markov_head.markov_w2.weight"] @ factor, memory, sure

    def choice(self, logits: Tensor, h: Tensor, before: int) -> Tensor:
        best = logits.topk(self.values["selector_top_k"]).indices
        left = self.tensors["candidate_selector.predecessor_codebook"][before]
        left = left * (self.tensors["candidate_selector.hidden_projection.weight"] @ h)
        right = self.tensors["candidate_selector.successor_codebook"][self.ids[best]]
        return best[(logits[best] + right @ left).argmax()]
