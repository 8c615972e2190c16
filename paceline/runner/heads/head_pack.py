"""The pack of an EAGLE-3 head: its matrices, the sketch of its output layer, and the tokens of its outputs."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.cpu.abi import Format
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, lay_out
from paceline.kernels.quant import Quantised, Weight, dequantise, values_of
from paceline.models.heads import EagleHead
from paceline.runner.heads.sketch import sketch, sketch_rank

VECTORS = ("embed_norm", "hidden_norm", "mlp_norm", "norm")
MATRICES = (("embed",), ("q",), ("k",), ("v",), ("o",), ("gate", "up"), ("down",), ("head",))  # interleaved together
DOWN, UP, EXACT = "sketch.down", "sketch.up", "sketch.exact"
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
    if (rank := sketch_rank(last, head.sketch)) is not None:
        outputs, inputs = last.shape
        layout.tiles((DOWN, Format.GROUP8, rank, inputs))
        layout.tiles((UP, Format.GROUP4, outputs, rank))
        layout.rows(EXACT, outputs, inputs)
    return layout


def fill_head(pack: Pack, head: EagleHead) -> None:
    """Write a head into its pack."""
    for name, weight in head.weights.items():
        pack.write(name, _floats(weight) if name == "fc" else weight)
    pack.write(IDS, head.ids)
    norm, last = head.weights["norm"], _floats(head.weights["head"])
    assert isinstance(norm, Tensor), "a norm is quantised"
    if UP in pack:
        rough = sketch(last, norm, head.sketch)
        assert rough is not None, "a sketch that was laid out"
        pack.write(DOWN, rough.down)
        pack.write(UP, rough.up)
        pack.write_in_8_bits(EXACT, last)


def _quantised(weights: dict[str, Weight], name: str) -> Quantised:
    weight = weights[name]
    assert isinstance(weight, Quantised), f"{name} is not quantised"
    return weight


def _floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantise(weight)
