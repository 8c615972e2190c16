"""A trained MTP head is accepted, and loses acceptance if any fact of its form is misread.

Whatever a drafter gets wrong costs only speed, so no comparison of texts would show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models import mtp
from paceline.models.eagle_config import EagleConfig
from tests.heads import write_head
from tests.mtp_checkpoints import LAYOUTS, Names, PlainMtp
from tests.plain_eagle import PlainTarget
from tests.trained_heads import TURNS, Text, accepted_share, answered, spread_norms

NAMES = Names.inside("mtp_layers.0.")
CHANCE = 1 / 259  # of the tiny target's tokens
LESS = 0.88  # share of the acceptance that a misread head may have at most


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    target, _ = LAYOUTS["alone for Qwen3"].write(tmp_path_factory.mktemp("mtp"))
    return answered(target)


@pytest.fixture(scope="module")
def values(text: Text) -> dict[str, Any]:
    found: dict[str, Any] = mtp.read_json(text.target.parent / "head" / "config.json")
    return found


@pytest.fixture(scope="module")
def trained(text: Text) -> dict[str, Tensor]:
    head = PlainMtp(text.target.parent / "head", PlainTarget(text.target), NAMES)
    spread_norms(head.tensors, width=1.0)
    head.train([*text.prompt, *text.tokens], turns=TURNS, steps=170)
    return head.tensors


@pytest.fixture(scope="module")
def share(
    text: Text, values: dict[str, Any], trained: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> float:
    """What is accepted of the head where everything is read right."""
    return accepted_share(text, f"mtp:{write_head(tmp_path_factory.mktemp('right'), values, trained)}")


def test_a_trained_head_is_accepted(share: float) -> None:
    assert share > 0.75 > 100 * CHANCE


def columns_turned(tensors: dict[str, Tensor]) -> None:
    tensors[NAMES.proj] = torch.cat(tensors[NAMES.proj].chunk(2, dim=1)[::-1], dim=1)


def norms_swapped(tensors: dict[str, Tensor]) -> None:
    tensors[NAMES.token], tensors[NAMES.hidden] = tensors[NAMES.hidden], tensors[NAMES.token]


def ones(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones_like(tensors[name])

    return change


TENSORS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "the order of fc's columns": columns_turned,
    "norms of embedding and state swapped": norms_swapped,
    "no norm of the embedding": ones(NAMES.token),
    "no norm of the state": ones(NAMES.hidden),
    "no norm before attention": ones(f"{NAMES.layer}input_layernorm.weight"),
    "no last norm": ones(NAMES.final),
}
NETWORK: dict[str, dict[str, Any]] = {
    "the state before the target's last norm": {"taps": (3,)},
    "the state of the layer before": {"taps": (1,)},
    "an output without its norm for the next token": {"norm_output": False},
}


@pytest.mark.parametrize("name", TENSORS)
def test_misread_tensors_cost_acceptance(
    name: str, text: Text, share: float, values: dict[str, Any], trained: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors = dict(trained)
    TENSORS[name](tensors)
    assert accepted_share(text, f"mtp:{write_head(tmp_path, values, tensors)}") < LESS * share


@pytest.mark.parametrize("name", NETWORK)
def test_a_misread_network_costs_acceptance(
    name: str,
    text: Text,
    share: float,
    values: dict[str, Any],
    trained: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = mtp._config

    def misread(*given: Any) -> EagleConfig:
        return replace(read(*given), **NETWORK[name])

    monkeypatch.setattr(mtp, "_config", misread)
    assert accepted_share(text, f"mtp:{write_head(tmp_path, values, trained)}") < LESS * share
