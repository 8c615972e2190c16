"""Trained heads are accepted, and lose acceptance if any flag of their config is read as its opposite.

Whatever a drafter gets wrong costs only speed, so no comparison of texts would show it. Each head is fitted to one text
of a tiny target, in plain torch (`tests.plain_eagle`), with the flags that its layout has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models.load import open_model
from tests.heads import write_head
from tests.plain_eagle import PlainHead, PlainTarget
from tests.published_heads import IDS, LAYOUTS, NESTED, Layout
from tests.trained_heads import (
    TURNS,
    Head,
    Misread,
    Text,
    accepted_share,
    inside,
    misread,
    say,
    spread_norms,
    without,
)

WHOLE = {"draft_vocab_size": None}
TRAINED = {
    "norms inside": Layout(
        {**LAYOUTS["eagle3, outputs of layers"].values, **WHOLE, "fc_norm": True, "norm_before_residual": True},
        {"attention_bias": True},
    ),
    "norms outside": Layout(
        {
            **LAYOUTS["speculators"].values,
            **WHOLE,
            "norm_output": True,
            "norm_before_fc": True,
            IDS: [0, 2],
            "norm_before_residual": False,
        },
        {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8},
        NESTED,
        taps=2,
        prefix="layers.0.",
    ),
    "parallel": Layout({**LAYOUTS["p-eagle"].values, **WHOLE}, nested=NESTED, prefix="layers.0."),
}


@pytest.fixture(scope="module")
def heads(text: Text, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Head]:
    return {name: trained(layout, text, tmp_path_factory.mktemp("head")) for name, layout in TRAINED.items()}


def trained(layout: Layout, text: Text, folder: Path) -> Head:
    head = PlainHead(
        layout.write(folder, vocab=open_model(str(text.target)).config.vocab_size), PlainTarget(text.target)
    )
    spread_norms(head.tensors, width=0.7 if "mask_hidden" in head.tensors else 1.0)
    random = torch.Generator().manual_seed(2)
    for name in [name for name in head.tensors if name.endswith("_proj.bias")]:  # large, so that the head needs them
        head.tensors[name] = head.tensors[name] + torch.randn(head.tensors[name].shape, generator=random)
    head.train([*text.prompt, *text.tokens], turns=TURNS, steps=100 if "mask_hidden" in head.tensors else 60)
    return head.values, head.tensors


def acceptance(head: Head, text: Text, folder: Path) -> float:
    return accepted_share(text, f"eagle:{write_head(folder, *head)}")


def llama(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A layer of Qwen3 as one of Llama, without norms of queries and keys."""
    inside(NESTED, model_type="llama")(config, tensors)
    without("q_norm", "k_norm", qk_norm=False)(config, tensors)


def one_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The norms of all taps as one over all features."""
    config |= {"fc_norm": False, "norm_before_fc": True}
    tensors["input_norm.weight"] = torch.cat([tensors.pop(f"fc_norm.{i}.weight") for i in range(3)])


MISREAD: dict[str, tuple[str, Misread]] = {
    "ids of outputs as inputs": ("norms inside", say(eagle_config={IDS: [0, 0, 1]})),
    "fc_norm ignored": ("norms inside", without("fc_norm.", fc_norm=False)),
    "fc_norm as norm_before_fc": ("norms inside", one_norm),
    "norm_before_residual ignored": ("norms inside", say(norm_before_residual=False)),
    "biases ignored": ("norms inside", without("_proj.bias", attention_bias=False)),
    "norm_output ignored": ("norms outside", say(norm_output=False)),
    "norm_before_fc ignored": ("norms outside", without("input_norm", norm_before_fc=False)),
    "norm_before_residual assumed": ("norms outside", say(norm_before_residual=True)),
    "q and k norms ignored": ("norms outside", llama),
    "window ignored": ("norms outside", inside(NESTED, layer_types=["full_attention"])),
    "ids in another order": ("norms outside", say(**{IDS: [2, 0]})),
    "another layer": ("norms outside", say(**{IDS: [0, 1]})),
    "another mask": ("parallel", say(mask_token_id=9)),
    "norm_before_residual not assumed": ("parallel", say(norm_before_residual=False)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_head_is_accepted(name: str, heads: dict[str, Head], text: Text, tmp_path: Path) -> None:
    found = acceptance(heads[name], text, tmp_path)
    assert found > 0.9


@pytest.mark.unwatched
@pytest.mark.parametrize("name", MISREAD)
def test_a_misread_flag_costs_acceptance(name: str, heads: dict[str, Head], text: Text, tmp_path: Path) -> None:
    head, change = MISREAD[name]
    found = acceptance(misread(heads[head], change), text, tmp_path)
    assert found < 0.75
