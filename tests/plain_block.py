"""Block drafters in plain torch, written from the published formulas: the second opinion of tests.

It reads the files itself, by their published names, and recomputes everything for every draft: no cache, no pages, no
network code of Paceline. The block is always whole. Blocks of one text are computed side by side, to train on them:
x [blocks, rows, hidden].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.plain_eagle import PlainTarget, fit, rms, rotate


class PlainBlock:
    """A block drafter of a directory: DFlash in both layouts, DSpark, or DFlash2."""

    def __init__(self, folder: Path, target: PlainTarget) -> None:
        values = json.loads((folder / "config.json").read_text())
        self.published = values
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
        states = self.drafted_rows(self.states(tokens, [len(tokens) - 1]))[0]
        before, found, sure = tokens[-1], list[int](), list[float]()
        memory = torch.zeros(1, self.values.get("markov_rank", 0))
        for h in states[:count]:
            logits = self.unary(h)
            if "markov_rank" in self.values:
                bias, memory, confidence = self.markov(h[None], torch.tensor([before]), memory)
                logits = logits + bias[0]
                sure += confidence
            best = int(self.choice(logits, h, before)) if "selector_rank" in self.values else int(logits.argmax())
            before = int(self.ids[best])
            found.append(before)
        return found, sure

    def train(self, tokens: Sequence[int], *, first: int, turns: int, steps: int, only: str = "") -> None:
        """Fit the drafter to one text: to the first `turns` tokens of all drafts that begin at `first` or later.
        `only`: part of the names of what is fitted."""
        trained = [name for name in self.tensors if only in name and not name.startswith("confidence_head")]
        params = [self.tensors[name].requires_grad_() for name in trained]
        anchors = list(range(first, len(tokens) - turns))
        entering, _ = self.target.states(tokens)
        whole = torch.tensor(tokens)
        wanted = torch.stack([whole[at + 1 : at + 1 + turns] for at in anchors])
        before = torch.stack([whole[at : at + turns] for at in anchors])
        fit(params, lambda: self._loss(tokens, anchors, entering, wanted, before), steps=steps)
        self.tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}

    def _loss(
        self, tokens: Sequence[int], anchors: list[int], entering: list[Tensor], wanted: Tensor, before: Tensor
    ) -> Tensor:
        states = self.drafted_rows(self.states(tokens, anchors, entering))
        memory = torch.zeros(len(anchors), self.values.get("markov_rank", 0))
        losses = []
        for turn in range(wanted.shape[1]):
            h, logits = states[:, turn], self.unary(states[:, turn])
            if "markov_rank" in self.values:
                bias, memory, _ = self.markov(h, before[:, turn], memory)
                logits = logits + bias
            if "selector_rank" in self.values:
                logits = logits + self.edges(h, before[:, turn])
            losses.append(torch.nn.functional.cross_entropy(logits, wanted[:, turn]))
        return torch.stack(losses).mean()

    def drafted_rows(self, states: Tensor) -> Tensor:
        return states[:, 0 if self.anchor_first else 1 :]

    def unary(self, h: Tensor) -> Tensor:
        """Logits of rows, before a head corrects them."""
        logits = h @ self.output.T * self.values.get("output_multiplier", 1.0)
        cap = self.values.get("final_logit_softcapping")
        return (logits / cap).tanh() * cap if cap else logits

    def states(self, tokens: Sequence[int], anchors: Sequence[int], entering: list[Tensor] | None = None) -> Tensor:
        """States [blocks, rows, hidden] after the last norm, of blocks that begin with the tokens at `anchors`."""
        entering = entering or self.target.states(tokens)[0]
        ids = self.values.get("aux_hidden_state_layer_ids") or [i + 1 for i in self.values["target_layer_ids"]]
        taps = torch.cat([entering[i][: max(anchors)] for i in ids], dim=1)
        context = rms(taps @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"])
        masks = [self.values["mask_token_id"]] * (self.values["block_size"] - 1)
        x = self.embedding[torch.tensor([[tokens[at], *masks] for at in anchors])]
        x = x * self.values.get("input_embedding_scale", 1.0)
        for index in range(self.shape["num_hidden_layers"]):
            x = self.layer(x, context, torch.tensor(anchors), index)
        return rms(x, self.tensors["norm.weight"])

    def layer(self, x: Tensor, context: Tensor, anchors: Tensor, index: int) -> Tensor:
        def get(name: str) -> Tensor:
            return self.tensors[f"layers.{index}.{name}.weight"]

        def convolved(name: str, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
            if "conv_group_size" not in self.values:
                return inputs, None
            projection = inputs @ get(f"{name}.kernel_projection").T
            kernels = projection.view(*x.shape[:2], 2, self.values["conv_kernel_size"], -1)
            return self.convolve(f"layers.{index}.{name}", inputs, kernels, 0), kernels

        inputs, kernels = convolved("attention_conv", rms(x, get("input_layernorm")))
        out = self.attention(inputs, context, anchors, index)
        x = x + (out if kernels is None else self.convolve(f"layers.{index}.attention_conv", out, kernels, 1))
        inputs, kernels = convolved("mlp_conv", rms(x, get("post_attention_layernorm")))
        gate, up, down = (get(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        out = (torch.nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
        return x + (out if kernels is None else self.convolve(f"layers.{index}.mlp_conv", out, kernels, 1))

    def convolve(self, name: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        base, group = self.tensors[f"{name}.base_kernel"], self.values["conv_group_size"]
        by_group, rows = torch.arange(x.shape[-1]) // group, []
        for row in range(x.shape[1]):
            taps = range(min(row + 1, self.values["conv_kernel_size"]))
            of_taps = [(base[side, t] + kernels[:, row, side, t][:, by_group]) * x[:, row - t] for t in taps]
            rows.append(torch.stack(of_taps).sum(0))
        return torch.stack(rows, dim=1)

    def attention(self, x: Tensor, context: Tensor, anchors: Tensor, index: int) -> Tensor:
        heads, keys, dim = (self.shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        before, at = torch.arange(len(context)), anchors[:, None] + torch.arange(x.shape[1])  # at [blocks, rows]

        def project(name: str, inputs: Tensor, count: int, positions: Tensor | None = None) -> Tensor:
            """[…, count, dim], rotated to the positions."""
            prefix = f"layers.{index}.self_attn.{name}"
            bias = self.tensors.get(f"{prefix}_proj.bias", torch.zeros(1))
            out = (inputs @ self.tensors[f"{prefix}_proj.weight"].T + bias).view(*inputs.shape[:-1], count, dim)
            if positions is None:
                return out
            out = rms(out, self.tensors[f"{prefix}_norm.weight"])
            return rotate(out.flatten(0, -3), positions.flatten(), self.shape["rope_theta"]).view(out.shape)

        k = [project("k", context, keys, before), project("k", x, keys, at)]
        v = [project("v", context, keys), project("v", x, keys)]
        k, v = ([each.repeat_interleave(heads // keys, dim=-2) for each in both] for both in (k, v))
        q = project("q", x, heads, at)
        scores = [torch.einsum("bihd,jhd->bhij", q, k[0]), torch.einsum("bihd,bjhd->bhij", q, k[1])]
        seen = torch.cat([self.seen(at, before.expand(len(at), -1), index, own=False), self.seen(at, at, index)], dim=2)
        weights = (torch.cat(scores, dim=3) / dim**0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        of_context, own = weights[..., : len(context)], weights[..., len(context) :]
        out = torch.einsum("bhij,jhd->bihd", of_context, v[0]) + torch.einsum("bhij,bjhd->bihd", own, v[1])
        bias = self.tensors.get(f"layers.{index}.self_attn.o_proj.bias", torch.zeros(1))
        return out.flatten(2) @ self.tensors[f"layers.{index}.self_attn.o_proj.weight"].T + bias

    def seen(self, at: Tensor, keys: Tensor, index: int, *, own: bool = True) -> Tensor:
        """A mask [blocks, rows, keys] of the keys that each row sees: of its `own` block, or of the context before
        it."""
        types = self.shape.get("layer_types")
        slides = types is not None and types[index] == "sliding_attention"
        causal = slides and not self.values.get("sliding_window_non_causal", False)
        for key in ("causal", "is_causal"):
            causal = self.values.get(key, causal)
        window = self.values.get("swa_window_size", self.shape.get("sliding_window"))
        back = at[:, :, None] - keys[:, None]
        seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
        if not own:
            seen = seen & (keys[:, None] < at[:, :1, None])
        return seen & (back.abs() < window) if slides or self.values.get("use_swa") else seen

    def markov(self, h: Tensor, before: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        """The bias [rows, draft vocabulary] of tokens `before`, the next memory, and the confidence of the first."""

        def product(name: str, x: Tensor) -> Tensor:
            return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(1))

        e = self.tensors["markov_head.markov_w1.weight"][before]
        kind, factor = self.values.get("markov_head_type", "vanilla"), e
        if kind == "gated":
            factor = product("markov_head.gate_proj", torch.cat([h, e], dim=1)).sigmoid() * e
        if kind == "rnn":
            joint = product("markov_head.joint_proj", torch.cat([memory, e, h], dim=1))
            gate, candidate, out = joint.chunk(3, dim=1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            factor = out.tanh()
        sure = []
        if self.values.get("enable_confidence_head"):
            inputs = torch.cat([h, e], dim=1) if self.values.get("confidence_head_with_markov") else h
            sure.append(float(product("confidence_head.proj", inputs)[0].detach().sigmoid()))
        return factor @ self.tensors["markov_head.markov_w2.weight"].T, memory, sure

    def edges(self, h: Tensor, before: Tensor) -> Tensor:
        """The summand of logits [rows, draft vocabulary] of DFlash2 for the token before each row."""
        left = self.tensors["candidate_selector.predecessor_codebook"][before]
        left = left * (h @ self.tensors["candidate_selector.hidden_projection.weight"].T)
        return left @ self.tensors["candidate_selector.successor_codebook"][self.ids].T

    def choice(self, logits: Tensor, h: Tensor, before: int) -> Tensor:
        best = logits.topk(self.values["selector_top_k"]).indices
        return best[(logits + self.edges(h[None], torch.tensor([before]))[0])[best].argmax()]
