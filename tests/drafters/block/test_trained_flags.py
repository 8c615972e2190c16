"""Trained block drafters are accepted, and lose acceptance if any flag of their config is misread.

Whatever a drafter gets wrong costs only speed, so no comparison of texts would show it. Each drafter is fitted to one
text of a tiny target, in plain torch (`tests.plain_block`), with the flags that its layout has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models.load import open_model
from tests.block_heads import DFLASH2, DSPARK, NESTED, SPECULATORS, Z_LAB, BlockLayout
from tests.heads import write_head
from tests.plain_block import PlainBlock
from tests.plain_eagle import PlainTarget
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

INNER = "dflash_config"
LONG = {"block_size": 16}  # so that what rows see of their own block counts
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
CHOICE = {**DFLASH2[INNER], "selector_rank": 32, "selector_top_k": 256}


@dataclass(frozen=True)
class Fit:
    """A layout, and how a drafter in it is fitted."""

    layout: BlockLayout
    sharp: float = 1.0  # factor of the norms of queries and keys
    scaled: Mapping[str, float] = field(default_factory=dict)  # factors of tensors, by parts of their names
    only: str = ""  # part of the names of what is fitted
    steps: int = 60


TRAINED = {
    "fill-in": Fit(BlockLayout({**Z_LAB, **LONG}, {"attention_bias": True}), 0.15, {"_proj.bias": 5.0}),
    "anchor first": Fit(BlockLayout({**Z_LAB, **LONG, "sample_from_anchor": True}), 0.15),
    "windows": Fit(BlockLayout({**SPECULATORS, **LONG}, SLIDES, nested=True), 0.15),
    "windows both ways": Fit(
        BlockLayout({**Z_LAB, **LONG, INNER: {**Z_LAB[INNER], "causal": False}}, {**SLIDES, "sliding_window": 9}),
        0.1,
    ),
    "markov head": Fit(  # it alone knows the text
        BlockLayout({**DSPARK, "markov_rank": 32, "markov_head_type": "rnn"}),
        scaled={"markov_w": 3.0, "norm.weight": 0.02},
        only="markov_",
        steps=100,
    ),
    "gated": Fit(BlockLayout({**DSPARK, "markov_head_type": "gated"}), scaled={"markov_w": 6.0}),
    "convolutions": Fit(BlockLayout(DFLASH2), scaled={"base_kernel": 3.0}),
    "choice": Fit(  # it alone knows the text
        BlockLayout({**DFLASH2, INNER: CHOICE}),
        scaled={"candidate_selector": 3.0, "norm.weight": 0.3},
        only="candidate_selector",
        steps=100,
    ),
}


@pytest.fixture(scope="module")
def heads(text: Text, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Head]:
    return {name: trained(fit, text, tmp_path_factory.mktemp("head")) for name, fit in TRAINED.items()}


def trained(fit: Fit, text: Text, folder: Path) -> Head:
    fit.layout.write(folder, vocab=open_model(str(text.target)).config.vocab_size)
    head = PlainBlock(folder, PlainTarget(text.target))
    spread_norms(head.tensors, width=0.7)
    factors = {"q_norm": fit.sharp, "k_norm": fit.sharp, **fit.scaled}
    for name in head.tensors:
        for part in [part for part in factors if part in name]:
            head.tensors[name] = head.tensors[name] * factors[part]
    head.train([*text.prompt, *text.tokens], first=len(text.prompt), turns=TURNS, steps=fit.steps, only=fit.only)
    return head.published, head.tensors


def acceptance(head: Head, text: Text, folder: Path) -> float:
    return accepted_share(text, f"block:{write_head(folder, *head)}")


def zeros(*parts: str) -> Misread:
    """As if the reader left out what some tensors do."""
    return lambda config, tensors: tensors.update(
        {name: torch.zeros_like(each) for name, each in tensors.items() if any(part in name for part in parts)}
    )


def other_taps(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The taps of convolutions in another order."""
    tensors |= {name: each.flip(1) for name, each in tensors.items() if "base_kernel" in name}


MISREAD: dict[str, tuple[str, Misread]] = {
    "another mask": ("fill-in", inside(INNER, mask_token_id=9)),
    "ids of outputs as inputs": ("fill-in", inside(INNER, target_layer_ids=[-1, -1, 0])),
    "rows of one position later": ("fill-in", say(sample_from_anchor=True)),
    "causal": ("fill-in", say(is_causal=True)),
    "biases ignored": ("fill-in", without("_proj.bias", attention_bias=False)),
    "rows of one position earlier": ("anchor first", say(sample_from_anchor=False)),
    "a shorter block": ("anchor first", say(block_size=TURNS)),
    "window ignored": ("windows", inside(NESTED, layer_types=["full_attention"] * 2)),
    "another window": ("windows", inside(NESTED, sliding_window=6)),
    "window both ways": ("windows", say(sliding_window_non_causal=True)),
    "ids of inputs as outputs": ("windows", say(aux_hidden_state_layer_ids=[1, 2, 2])),
    "window both ways as causal": ("windows both ways", inside(INNER, causal=True)),
    "window both ways ignored": ("windows both ways", say(layer_types=["full_attention"] * 2)),
    "markov head ignored": (
        "markov head",
        without("markov_", "confidence_", markov_rank=0, enable_confidence_head=False),
    ),
    "anchor first not assumed": ("gated", say(sample_from_anchor=False)),
    "gate ignored": ("gated", without("markov_head.gate_proj", markov_head_type="vanilla")),
    "kernels of rows ignored": ("convolutions", zeros("kernel_projection")),
    "taps in another order": ("convolutions", other_taps),
    "choice ignored": ("choice", zeros("successor_codebook")),
    "choice among one": ("choice", inside(INNER, selector_top_k=1)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_block_drafter_is_accepted(name: str, heads: dict[str, Head], text: Text, tmp_path: Path) -> None:
    found = acceptance(heads[name], text, tmp_path)
    assert found > 0.9


@pytest.mark.unwatched
@pytest.mark.parametrize("name", MISREAD)
def test_a_misread_flag_costs_acceptance(name: str, heads: dict[str, Head], text: Text, tmp_path: Path) -> None:
    head, change = MISREAD[name]
    found = acceptance(misread(heads[head], change), text, tmp_path)
    assert found < 0.75
