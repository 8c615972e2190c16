"""Tiny targets with MTP heads of random weights, in each published layout; and the heads in plain torch.

`PlainMtp` is the second opinion of tests: it is written from the published formulas, reads tensors by their published
names, and recomputes everything for every token. It uses no network code and no table of names of Paceline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, write_model
from tests.plain_eagle import PlainTarget, Rows, fit, layer, rms

COUNT = "num_nextn_predict_layers"
SPECULATORS = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_config": {"algorithm": "mtp", "proposal_methods": [{"speculative_tokens": 3}]},
    COUNT: 1,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
}
SIZES: Mapping[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
BIASES = {f"self_attn.{name}_proj.bias": (SIZES[f"self_attn.{name}_proj.weight"][0],) for name in "qkv"}
NORMS = {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
MORE: Mapping[str, Mapping[str, tuple[int, ...]]] = {"llama": {}, "qwen2": BIASES, "mimo": BIASES, "qwen3": NORMS}


@dataclass(frozen=True)
class Names:
    """How a layout calls the parts of a module."""

    token: str
    hidden: str
    proj: str
    final: str
    layer: str  # beginning of the names of its layer

    @classmethod
    def inside(cls, prefix: str) -> Names:
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        return cls(*(f"{prefix}{name}.weight" for name in names), prefix)


STITCHED = Names(
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.layers.0.",
)


@dataclass(frozen=True)
class Layout:
    """One way to publish an MTP head."""

    family: str
    names: Names
    hidden_first: bool = False
    count: str = COUNT
    alone: bool = False  # in a directory of its own
    left_out: tuple[str, ...] = ()  # keys of its layer's config that are left out, as `speculators` does with defaults
    copies: bool = False  # copies of the target's embedding and output layer beside it
    modules: int = 1
    sharded: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)  # more of the config

    def write(self, folder: Path, seed: int = 0) -> tuple[Path, Path]:
        """Write a target and a head; return the directory of each, which may be the same."""
        target = write_target(folder / "target", self.family)
        random = torch.Generator().manual_seed(seed)
        tensors = module(self.names, self.family, random)
        for number in range(1, self.modules):
            other = self.names.layer.replace("0", str(number))
            tensors |= module(Names.inside(other), self.family, random)
        config = json.loads((target / "config.json").read_text())
        if not self.alone:
            config |= {self.count: self.modules, **self.values}
            (target / "config.json").write_text(json.dumps(config))
            self._add(target, tensors)
            return target, target
        inner = {key: value for key, value in config.items() if key not in (*self.left_out, "architectures")}
        (folder / "head").mkdir()
        values = {**SPECULATORS, "transformer_layer_config": inner, **self.values}
        (folder / "head" / "config.json").write_text(json.dumps(values))
        if self.copies:
            own = load_file(target / "model.safetensors")
            tensors |= {
                "embed_tokens.weight": own["model.embed_tokens.weight"],
                "lm_head.weight": own["lm_head.weight"],
            }
        save_file(tensors, folder / "head" / "model.safetensors")
        return target, folder / "head"

    def _add(self, target: Path, tensors: Mapping[str, Tensor]) -> None:
        own = load_file(target / "model.safetensors")
        if not self.sharded:
            save_file({**own, **tensors}, target / "model.safetensors")
            return
        (target / "model.safetensors").unlink()
        files = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": dict(tensors)}
        for name, part in files.items():
            save_file(part, target / name)
        places = {name: file for file, part in files.items() for name in part}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


LAYOUTS: Mapping[str, Layout] = {
    "MiMo": Layout("mimo", Names.inside("model.mtp_layers.0."), hidden_first=True),
    "MiMo, two modules, shards": Layout(
        "mimo", Names.inside("model.mtp_layers.0."), hidden_first=True, modules=2, sharded=True
    ),
    "stitched into Qwen3": Layout("qwen3", STITCHED),
    "stitched into Llama": Layout("llama", STITCHED, count="mtp_num_hidden_layers"),
    "inside of Qwen2": Layout("qwen2", Names.inside("mtp_layers.0.")),
    "alone for Llama": Layout("llama", Names.inside("mtp_layers.0."), alone=True, copies=True),
    "alone for Qwen3": Layout(
        "qwen3",
        Names.inside("mtp_layers.0."),
        alone=True,
        left_out=("num_attention_heads", "max_position_embeddings", "intermediate_size"),
    ),
}


def write_target(folder: Path, family: str) -> Path:
    folder.mkdir(parents=True)
    write_model(folder)
    config = json.loads((folder / "config.json").read_text()) | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(config))
    random, tensors = torch.Generator().manual_seed(3), load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.exp(torch.randn(HIDDEN, generator=random))  # far from no norm at all
    for index in range(LAYERS):
        tensors |= {f"model.layers.{index}.{name}": draw(size, random) for name, size in MORE[family].items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def module(names: Names, family: str, random: torch.Generator) -> dict[str, Tensor]:
    sizes = {f"{names.layer}{name}": size for name, size in {**SIZES, **MORE[family]}.items()}
    sizes |= dict.fromkeys((names.token, names.hidden, names.final), (HIDDEN,))
    return {name: draw(size, random) for name, size in (sizes | {names.proj: (HIDDEN, 2 * HIDDEN)}).items()}


def draw(size: tuple[int, ...], random: torch.Generator) -> Tensor:
    return (1 if len(size) == 1 else 0) + 0.13 * torch.randn(size, generator=random)


class PlainMtp:
    """The first module of a directory; `names` and `hidden_first` as its layout has them."""

    def __init__(self, folder: Path, target: PlainTarget, names: Names, *, hidden_first: bool = False) -> None:
        files = folder.glob("*.safetensors")
        found = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        parts = (names.token, names.hidden, names.proj, names.final, names.layer)
        self.tensors = {name: tensor for name, tensor in found.items() if name.startswith(parts)}
        self.names, self.hidden_first, self.target = names, hidden_first, target
        self.embedding = found.get("embed_tokens.weight", target.embedding)
        self.output = found.get("lm_head.weight", target.output)

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy draft after these tokens."""
        states = self.target.states(tokens[:-1])[1]
        following, found = list(tokens[1:]), list[int]()
        for _ in range(count):
            outputs = self.outputs(states, following)
            found.append(int((self.output @ outputs[-1]).argmax()))
            states, following = torch.cat([states, outputs[-1:]]), [*following, found[-1]]
        return found

    def outputs(self, states: Tensor, following: Sequence[int], rows: Rows | None = None) -> Tensor:
        """The normed outputs of rows: what the output layer reads, and the next row's state."""
        get, names = self.tensors.__getitem__, self.names
        embedded = rms(self.embedding[list(following)], get(names.token))
        hidden = rms(states, get(names.hidden))
        pair = [hidden, embedded] if self.hidden_first else [embedded, hidden]
        x = torch.cat(pair, dim=1) @ get(names.proj).T
        inputs = rms(x, get(f"{names.layer}input_layernorm.weight"))
        return rms(layer(x, inputs, self.tensors, names.layer, self.target.shape, rows), get(names.final))

    def train(self, tokens: Sequence[int], *, turns: int, steps: int) -> None:
        """Fit the head to all drafts of `turns` tokens that begin in one text."""
        states, count = self.target.states(tokens)[1], len(tokens) - 1 - turns
        wanted = torch.tensor([token for turn in range(turns) for token in tokens[2 + turn : 2 + turn + count]])
        following = [token for turn in range(turns) for token in tokens[1 + turn : 1 + turn + count]]

        def loss() -> Tensor:
            given = states[:count]
            for turn in range(1, turns + 1):
                outputs = self.outputs(given, following[: turn * count], Rows.of(count, turn))
                given = torch.cat([given, outputs[-count:]])
            return torch.nn.functional.cross_entropy(outputs @ self.output.T, wanted)

        fit([tensor.requires_grad_() for tensor in self.tensors.values()], loss, steps=steps)
        self.tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
