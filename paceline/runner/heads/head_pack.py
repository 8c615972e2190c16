"""The packs of heads: their matrices, the sketch of an output layer, and the tokens of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, lay_out
from paceline.kernels.quant import Quantised, Weight, dequantise, values_of
from paceline.models.heads import EagleHead
from paceline.runner.heads.sketch import UP, lay_out_sketch, sketch_rank, write_sketch

INTERLEAVED = {"gate": "up"}  # matrices whose tiles alternate with those of another
IDS = "ids"


def head_layout(head: EagleHead) -> Layout:
    """Lay out a head with quantised weights, which may be without data, in the order of a pass."""
    layout, weights = layout_of(head.weights), head.weights
    layout.vector(IDS, len(head.ids))
    if "head" in weights:
        last = values_of(weights["head"])
        lay_out_sketch(layout, last, sketch_rank(last, head.sketch))
    return layout


def layout_of(weights: dict[str, Weight]) -> Layout:
    """Lay out quantised matrices and vectors in their order, after `fc` in fp16."""
    layout = Layout(load_library())
    layout.half("fc", *values_of(weights["fc"]).shape)
    for name, weight in weights.items():
        if values_of(weight).dim() == 1:
            layout.vector(name, len(values_of(weight)))
        elif name != "fc" and name.rpartition(".")[2] not in INTERLEAVED.values():
            lay_out(layout, [(each, _quantised(weights, each)) for each in (name, *_partner(name))])
    return layout


def fill(pack: Pack, weights: dict[str, Weight]) -> None:
    """Write matrices and vectors into their pack."""
    for name, weight in weights.items():
        pack.write(name, _floats(weight) if name == "fc" else weight)


def _partner(name: str) -> tuple[str, ...]:
    prefix, _, kind = name.rpartition(".")
    return (f"{prefix}.{INTERLEAVED[kind]}",) if kind in INTERLEAVED else ()


def fill_head(pack: Pack, head: EagleHead) -> None:
    """Write a head into its pack."""
    fill(pack, head.weights)
    pack.write(IDS, head.ids)
    if UP in pack:
        hidden = head.config.decoder.hidden_size
        norm = head.weights.get("norm", torch.ones(hidden))
        assert isinstance(norm, Tensor), "a norm is quantised"
        write_sketch(pack, _floats(head.weights["head"]), norm, head.sketch)


def _quantised(weights: dict[str, Weight], name: str) -> Quantised:
    weight = weights[name]
    assert isinstance(weight, Quantised), f"{name} is not quantised"
    return weight


def _floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantise(weight)
