"""Where the ranks of GPUs are, which part of a model each has, and what is refused before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.device_ranks import lead
from paceline.errors import InvalidRequest
from paceline.kernels.cuda.exchange import MAX_RANKS, Peers
from paceline.kernels.cuda.tiles import UNIT
from paceline.kernels.quant import values_of
from paceline.models.load import open_model
from paceline.models.shapes import SHAPES, random_weights
from paceline.models.tensor_names import expected_shapes
from paceline.models.weights import Format, load_weights
from paceline.runner.loading.device_ranks import devices_of
from paceline.runner.parallel.device_part import (
    cut_weights,
    format_of_ranks,
    rank_config,
    read_weights,
    share_of,
    with_own_head,
)
from paceline.runner.parallel.split import Split, plan_split
from tests.runner.parallel.split_models import write_tiny
from tests.tiny_models import TARGET

BIG = SHAPES["llama-3.1-8b"]


def plan(degree: int, *, same_bits: bool = True) -> Split:
    return plan_split("big", BIG, degree=degree, same_bits=same_bits, packed=True, even=UNIT, most=MAX_RANKS)


def test_a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of(2) == ["cuda:0", "cuda:1"]
    with pytest.raises(InvalidRequest, match="tensor_parallel 3: each rank needs a GPU, and torch finds 2; take 2 at"):
        devices_of(3)
    monkeypatch.setenv("PACELINE_SHARE_GPUS", "1")
    assert devices_of(3) == ["cuda:0", "cuda:1", "cuda:0"]


def test_what_is_refused_before_weights_are_read() -> None:
    config = EngineConfig.of(device="cuda", tensor_parallel=2, drafter_tensor_parallel=2)
    with pytest.raises(InvalidRequest, match="drafter_tensor_parallel 2: on GPUs every rank has the whole drafter"):
        lead("nowhere", [], config, format="auto")
    with pytest.raises(InvalidRequest, match=r"tensor_parallel 16: .* can be split over 1, 2, 4 or 8 ranks only"):
        plan(16, same_bits=False)
    with pytest.raises(InvalidRequest, match=r"with multiples of 256 inputs, and can be split .* over 1 rank only"):
        plan_split("odd", replace(BIG, intermediate_size=100), degree=2, same_bits=True, packed=True, even=UNIT)
    for format in ("int8", "fp8"):
        with pytest.raises(InvalidRequest, match=f"{format} weights have one scale for all inputs"):
            format_of_ranks(format, plan(2), quantised=False)  # type: ignore[arg-type]
    assert format_of_ranks("native", plan(2), quantised=True) == "bf16"
    assert format_of_ranks("fp8", plan(2, same_bits=False), quantised=False) == "fp8"


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_products_have_the_parts_of_the_whole_model(degree: int) -> None:
    """Parts of o and down are shards, of which each rank has as many."""
    peers = Peers.alone(BIG.hidden_size, "cpu")
    assert dict(share_of(BIG, plan(degree, same_bits=False), peers).parts) == {}
    parts = share_of(BIG, plan(degree), peers).parts
    assert (parts["o"], parts["down"]) == (8 // degree, 8 // degree)
    whole = share_of(BIG, plan(1), peers).parts
    assert {name: parts[name] for name in ("q", "head")} == {name: whole[name] for name in ("q", "head")}


def test_ranks_have_all_weights_together() -> None:
    config = replace(TARGET.config, tied_head=True)
    weights = dict(random_weights(config))
    split = plan_split("tiny", config, degree=2, same_bits=False, packed=True)
    ranks = [
        with_own_head(
            dict(cut_weights(weights.items(), config, rank=rank, split=split)), config, rank=rank, split=split
        )
        for rank in range(2)
    ]
    for name, shape in expected_shapes(rank_config(config, 0, split)).items():
        assert ranks[0][name].shape == shape  # type: ignore[union-attr]
    for name, dim in {"layers.0.q": 0, "layers.0.o": 1, "layers.0.up": 0, "layers.0.down": 1}.items():
        joined = torch.cat([rank[name] for rank in ranks], dim)  # type: ignore[misc]
        assert torch.equal(joined, weights[name])
    assert torch.equal(torch.cat([rank["head"] for rank in ranks]), weights["embed"])  # type: ignore[misc]
    assert torch.equal(ranks[1]["embed"], weights["embed"])  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_a_rank_reads_its_part_of_files(format: Format, tmp_path: Path) -> None:
    """Groups of an `int4` matrix have the bits that they have in the whole model."""
    opened = open_model(str(write_tiny(tmp_path, TARGET.config, TARGET.weights)))
    split = plan_split("tiny", opened.config, degree=2, same_bits=False, packed=True)
    whole = load_weights(opened.source, opened.config, format=format)
    ranks = [read_weights(opened, format=format, device="cpu", rank=rank, split=split) for rank in range(2)]
    for name, dim in {"layers.0.k": 0, "layers.1.o": 1, "layers.0.gate": 0, "layers.1.down": 1, "head": 0}.items():
        assert torch.equal(torch.cat([values_of(rank[name]) for rank in ranks], dim), values_of(whole[name]))
        assert values_of(ranks[0][name]).shape != values_of(whole[name]).shape
    for rank in ranks:
        assert torch.equal(values_of(rank["embed"]), values_of(whole["embed"]))
