"""The pack of an EAGLE-3 head: its matrices, the sketch of its output layer, and the tokens of its outputs."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, lay_out
from paceline.kernels.quant import Quantised, Weight, dequantise, values_of
from paceline.models.heads import EagleHead
from paceline.runner.heads.sketch import UP, lay_out_sketch, sketch_rank, write_sketch

VECTORS = ("embed_norm", "hidden_norm", "mlp_norm", "norm")
MATRICES = (("embed",), ("q",), ("k",), ("v",), ("o",), ("gate", "up"), ("down",), ("head",))  # interleaved together
IDS = "ids"


def head_layout(head: EagleHead) -> Layout:
    """Lay out a head with quantised weights, which may be without data."""
    layout, weights = Layout(load_library()), head.weights
    layout.half("fc", *values_of(weights["fc"]).shape)
    for names in MATRICES:
        if names[0] in weights:
            lay_out(layout, [(name, _quantised(weights, name)) for name in names])
    for name in VECTORS:
        layout.vector(name, len(values_of(weights[name])))
    layout.vector(IDS, len(head.ids))
    last = values_of(weights["head"])
    lay_out_sketch(layout, last, sketch_rank(last, head.sketch))
    return layout


def fill_head(pack: Pack, head: EagleHead) -> None:
    """Write a head into its pack."""
    for name, weight in head.weights.items():
        pack.write(name, _floats(weight) if name == "fc" else weight)
    pack.write(IDS, head.ids)
    norm = head.weights["norm"]
    assert isinstance(norm, Tensor), "a norm is quantised"
    if UP in pack:
        write_sketch(pack, _floats(head.weights["head"]), norm, head.sketch)


def _quantised(weights: dict[str, Weight], name: str) -> Quantised:
    weight = weights[name]
    assert isinstance(weight, Quantised), f"{name} is not quantised"
    return weight


def _floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantise(weight)
