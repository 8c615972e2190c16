"""Weights by canonical name, from any source, in the wanted format.

    embed  norm  head          [vocab, hidden]  [hidden]  [vocab, hidden]; no head where it is tied to embed
    layers.i.attn_norm  q  k  v  o  q_norm  k_norm  post_attn_norm  mlp_norm  gate  up  down  post_mlp_norm
    layers.i.q.bias …

Matrices are [out, in]; norms are ready to multiply; rows of q and k are in "rotate half" order. What comes out has
exactly the names and shapes the config calls for: tensors left over or missing are an error that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from paceline.errors import ModelFileError, UnknownOption, UnsupportedModel
from paceline.kernels.quant import GROUP, Quantised, quantise
from paceline.models.config import ModelConfig
from paceline.models.naming import Dialect, expected_shapes
from paceline.models.naming import Weight as Weight

Format = Literal["auto", "native", "fp32", "bf16", "int8", "int4", "int4-all"]  # all: embedding and head as well
Progress = Callable[[int, int], None]  # bytes done, bytes in all
CHUNK = 1 << 20  # weights converted at a time, few enough to stay in the cache


class TensorSource(Protocol):
    """A file or folder of named tensors of which rows can be read. A vector is a matrix of one row."""

    dialect: Dialect  # how its tensors are called
    quantised: bool  # whether `read_native` gives Quantised for some

    @property
    def label(self) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def size(self, name: str) -> int:
        """In bytes, for the progress."""

    def read_float(self, name: str, start: int, stop: int) -> Tensor: ...

    def read_native(self, name: str, start: int, stop: int) -> Weight: ...


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    *,
    format: Format = "auto",
    progress: Progress | None = None,
) -> dict[str, Weight]:
    return dict(iterate_weights(source, config, format=format, progress=progress))


def iterate_weights(
    source: TensorSource,
    config: ModelConfig,
    *,
    format: Format = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[str, Weight]]:
    """One tensor after the other; names and shapes of all are checked before the first is read."""
    format = resolve_format(format, quantised=source.quantised)
    names, shapes = match_names(source, config), source.shapes()
    total = sum(source.size(name) for name in names.values())
    done = 0
    for canonical, name in names.items():
        weight = _read(source, name, canonical, shapes[name], format)
        if not _finite(weight):
            raise ModelFileError(f"{source.label}: tensor {name!r} holds NaN or infinite values; fetch the file again")
        yield canonical, source.dialect.convert(canonical, weight, config)
        done += source.size(name)
        if progress:
            progress(done, total)


def resolve_format(format: str, *, quantised: bool) -> Format:
    if format not in get_args(Format):
        raise UnknownOption("weight format", format, get_args(Format))
    if format == "auto":
        return "native" if quantised else "fp32"
    return format  # type: ignore[return-value]


def match_names(source: TensorSource, config: ModelConfig) -> dict[str, str]:
    """The file's name of each canonical tensor, in the order of the layers."""
    shapes, expected, dialect = source.shapes(), expected_shapes(config), source.dialect
    wanted = {name: dialect.canonical(name, config) for name in shapes if not dialect.harmless(name, config)}
    known = {canonical: name for name, canonical in wanted.items() if canonical in expected}
    extra = [name for name, canonical in wanted.items() if canonical not in expected]
    missing = [canonical for canonical in expected if canonical not in known]
    if missing:
        raise ModelFileError(f"{source.label}: tensors are missing: {_some(missing)}")
    if extra:
        raise ModelFileError(f"{source.label}: tensors that the model has no place for: {_some(extra)}")
    for canonical, name in known.items():
        if shapes[name] != expected[canonical]:
            raise ModelFileError(
                f"{source.label}: tensor {name!r} has shape {shapes[name]}; by the config it is {expected[canonical]}"
            )
    return {canonical: known[canonical] for canonical in expected}


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest


def _read(source: TensorSource, name: str, canonical: str, shape: tuple[int, ...], format: Format) -> Weight:
    if len(shape) == 1:
        return source.read_float(name, 0, 1).float().flatten()
    make = _maker(source, name, canonical, format, shape)
    rows = max(1, CHUNK // shape[1])
    return _join([make(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)])


def _maker(
    source: TensorSource, name: str, canonical: str, format: Format, shape: tuple[int, ...]
) -> Callable[[int, int], Weight]:
    """A function from a range of rows to these rows in the wanted format."""
    if format == "native":
        return lambda start, stop: source.read_native(name, start, stop)
    if format in ("fp32", "bf16"):
        dtype = torch.float32 if format == "fp32" else torch.bfloat16
        return lambda start, stop: source.read_float(name, start, stop).to(dtype)
    group = None if format == "int8" else GROUP
    bits = 8 if format == "int8" or (format == "int4" and canonical in ("embed", "head")) else 4
    if group and shape[1] % group:
        raise UnsupportedModel(
            f"{source.label}: {name!r} has {shape[1]} inputs; int4 needs a multiple of {group}, use int8"
        )
    return lambda start, stop: quantise(source.read_float(name, start, stop).float(), bits=bits, group=group)


def _finite(weight: Weight) -> bool:
    """Also as fp16, where kernels pack it so: the scales and minimums of groups."""
    if not isinstance(weight, Quantised):
        return bool(weight.isfinite().all())
    parts = (weight.scale, weight.minimum) if weight.bits == 4 else (weight.scale,)
    return all(bool((part.half() if weight.grouped else part).isfinite().all()) for part in parts)


def _join(parts: list[Weight]) -> Weight:
    if len(parts) == 1:
        return parts[0]
    whole = [part for part in parts if isinstance(part, Tensor)]
    if len(whole) == len(parts):
        return torch.cat(whole)
    pieces = [part for part in parts if isinstance(part, Quantised)]
    assert len(pieces) == len(parts), "rows of one tensor came in different formats"
    return Quantised(
        q=torch.cat([piece.q for piece in pieces]),
        scale=torch.cat([piece.scale for piece in pieces]),
        minimum=torch.cat([piece.minimum for piece in pieces]),
        bits=pieces[0].bits,
    )
