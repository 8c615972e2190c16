"""The pack of a decoder: which weights lie side by side, and how they come there from memory or from a file."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping

from torch import Tensor

from paceline.errors import ModelFileError
from paceline.kernels.cpu.abi import TILE
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, lay_out
from paceline.kernels.quant import Weight, values_of
from paceline.models.config import ModelConfig
from paceline.models.weights import Format, Progress, TensorSource, match_names
from paceline.runner.heads.sketch import fitted_rank, lay_out_sketch

ROWS_BYTES = 16 << 20  # bytes of a file packed at a time: few in memory, and enough work for all threads
INTERLEAVED = {"gate": "up"}  # matrices whose tiles alternate with those of another


def decoder_layout(
    weights: Mapping[str, Weight], *, shapes: Mapping[str, tuple[int, ...]] | None = None, shortlist: bool = False
) -> Layout:
    """Lay out the weights of a decoder, which may be without data, in the order of a pass.

    `shapes`: the parts of a shard; weights that it lacks are left out. `shortlist`: with the sketch of the output
    layer, if that pays."""
    layout = Layout(load_library())
    if shapes is not None:
        weights = {name: weight for name, weight in weights.items() if name in shapes}
    matrices = {name: weight for name, weight in weights.items() if not _is_vector(weight)}
    for name, weight in matrices.items():
        prefix, _, kind = name.rpartition(".")
        partner = f"{prefix}.{INTERLEAVED[kind]}" if kind in INTERLEAVED else None
        if kind not in INTERLEAVED.values():
            pair = [(name, weight), *([(partner, matrices[partner])] if partner else [])]
            lay_out(layout, pair, shapes=shapes)
    for name, weight in weights.items():
        if isinstance(weight, Tensor) and weight.dim() == 1:
            layout.vector(name, len(weight) if shapes is None else shapes[name][0])
    if shortlist:
        last = values_of(weights[output_layer(weights)])
        lay_out_sketch(layout, last, fitted_rank(last))
    return layout


def output_layer(names: Container[str]) -> str:
    """Return the name of the matrix that computes logits."""
    return "head" if "head" in names else "embed"


def pack_decoder(weights: MutableMapping[str, Weight], *, threads: int) -> Pack:
    """Pack weights from memory. Each is taken out of the mapping."""
    pack = Pack(decoder_layout(weights), threads=threads)
    for name in list(weights):
        pack.write(name, weights.pop(name))
    return pack


def read_decoder(
    pack: Pack, source: TensorSource, config: ModelConfig, *, format: Format, progress: Progress | None = None
) -> None:
    """Pack the weights of the layout from a file, some rows at a time. `format` is resolved; "native" keeps integers of
    the file."""
    shapes = source.shapes()
    names = {canonical: name for canonical, name in match_names(source, config).items() if canonical in pack}
    total, done = sum(source.size(name) for name in names.values()), 0
    for canonical, name in names.items():
        if not _read_one(pack, source, config, canonical, name, shapes[name], keep=format == "native"):
            raise ModelFileError(f"{source.label}: tensor {name!r} holds NaN or infinite values; fetch the file again")
        done += source.size(name)
        if progress:
            progress(done, total)


def _read_one(
    pack: Pack, source: TensorSource, config: ModelConfig, canonical: str, name: str, shape: tuple[int, ...], keep: bool
) -> bool:
    """Pack one tensor; False: a number in it is not finite."""
    if len(shape) == 1:
        vector = source.read_float(name, 0, 1).float().flatten()
        converted = source.dialect.convert(canonical, vector, config)
        pack.write(canonical, converted)
        return bool(vector.isfinite().all())
    order = source.dialect.row_order(canonical, config)
    places = None if order is None else order.argsort().int()  # row i of the file is output places[i]
    step = max(TILE, ROWS_BYTES * shape[0] // source.size(name) // TILE * TILE)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        some = None if places is None else places[start:stop]
        if not pack.write_rows(canonical, source.read_stored(name, start, stop), first=start, places=some, keep=keep):
            return False
        source.release(name, start, stop)
    return True


def _is_vector(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 1
