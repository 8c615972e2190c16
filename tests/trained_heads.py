"""Heads that are fitted to one text of a tiny target: norms to start from, ways to misread, and what is accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.llm import LLM
from paceline.types import OFF, SamplingParams, Speculation

OPTIONS = {"max_context": 128, "max_sequences": 1, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPT, TURNS = "paceline", 3  # TURNS: tokens of a draft
Head = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and tensors
Misread = Callable[[dict[str, Any], dict[str, Tensor]], None]


class Text(NamedTuple):
    target: Path
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the target's answer


def answered(target: Path) -> Text:
    llm = LLM(str(target), drafter=[], format="fp32", **OPTIONS)
    [answer] = llm.generate(PROMPT, PARAMS, speculation=OFF)
    return Text(target, tuple(llm.parts.tokenizer.encode(PROMPT)), tuple(answer.tokens))


def spread_norms(tensors: dict[str, Tensor], *, width: float) -> None:
    """Make norms differ much by column, so that no norm is like another."""
    random = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and name.endswith("norm.weight"):
            scale = 3.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            tensors[name] = tensor * scale * torch.exp(width * torch.randn(tensor.shape, generator=random))


def accepted_share(text: Text, head: str) -> float:
    """Accepted by drafted tokens of the text that the head was fitted to; `head`: as a user names it."""
    words = f"{head},min_confidence=0,max_draft={TURNS}"
    llm = LLM(str(text.target), drafter=words, format="fp32", **OPTIONS)
    [answer] = llm.generate(PROMPT, PARAMS, speculation=Speculation(drafter=head.partition(":")[0]))
    assert tuple(answer.tokens) == text.tokens
    return answer.stats.accepted / answer.stats.drafted


def say(**values: Any) -> Misread:
    """As if the config had other values."""
    return lambda config, tensors: config.update(values)


def inside(part: str, **values: Any) -> Misread:
    """As if a mapping in the config had other values."""
    return lambda config, tensors: config[part].update(values)


def without(*parts: str, **values: Any) -> Misread:
    """As if the reader did not know some tensors, by parts of their names; with other values in the config."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= values
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def misread(head: Head, change: Misread) -> Head:
    """A copy of a head with a change that stands for a fault of the reader."""
    values, tensors = copy.deepcopy(head[0]), dict(head[1])
    change(values, tensors)
    return values, tensors
