"""Weights by canonical name, from any source, in the requested format.

    embed  norm  head          [vocab, hidden]  [hidden]  [vocab, hidden]; no head if it is tied to embed
    layers.i.attn_norm  q  k  v  o  q_norm  k_norm  post_attn_norm  mlp_norm  gate  up  down  post_mlp_norm
    layers.i.q.bias …

Matrices are [out, in]; norms are ready to multiply; rows of q and k are in "rotate half" order. The result has exactly
the names and shapes that the config implies: an error names tensors that are missing or left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor

from paceline.errors import ModelFileError, UnknownOption, UnsupportedModel
from paceline.kernels.cpu.pack import Rows
from paceline.kernels.quant import FP8, GROUP, Float8, Quantised, quantise, quantise_fp8
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import Dialect, expected_shapes
from paceline.models.tensor_names import Weight as Weight

# int4 keeps embedding and head in 8 bits; int4-all has them in 4 bits, too
Format = Literal["auto", "native", "fp32", "bf16", "fp8", "int8", "int4", "int4-all"]
ENDS = ("embed", "head")
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
Device = torch.device | str
Progress = Callable[[int, int], None]  # arguments: bytes done, bytes in all
CHUNK = 1 << 20  # weights converted at a time on a CPU; few enough to stay in the cache
DEVICE_CHUNK = 1 << 25  # weights copied to a GPU at a time; enough to use the bandwidth of its bus


class TensorSource(Protocol):
    """A file or folder of named tensors, readable by rows. A vector is a matrix of one row."""

    dialect: Dialect  # names of its tensors
    quantised: bool  # True: `read_native` returns Quantised for some tensors

    @property
    def label(self) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def stored_type(self, name: str) -> object:
        """Return the type of a tensor's numbers or blocks."""

    def size(self, name: str) -> int:
        """Return the size of a tensor in bytes, to report progress."""

    def read_float(self, name: str, start: int, stop: int) -> Tensor: ...

    def read_native(self, name: str, start: int, stop: int) -> Weight: ...

    def read_stored(self, name: str, start: int, stop: int) -> Rows:
        """Return rows of a matrix as they are stored if kernels can read them so, and else as floats."""

    def release(self, name: str, start: int, stop: int) -> None:
        """Let the system take back the memory of rows that were read."""

    def files(self) -> list[Path]:
        """Name the files that hold the tensors."""

    def blank(self) -> TensorSource:
        """Return a source of the same tensors that reads headers only: all numbers are zeros."""


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    *,
    format: Format = "auto",
    device: Device = "cpu",
    progress: Progress | None = None,
) -> dict[str, Weight]:
    return dict(iterate_weights(source, config, format=format, device=device, progress=progress))


def iterate_weights(
    source: TensorSource,
    config: ModelConfig,
    *,
    format: Format = "auto",
    device: Device = "cpu",
    progress: Progress | None = None,
) -> Iterator[tuple[str, Weight]]:
    """Yield one tensor after the other. Names and shapes of all are checked before the first is read.

    Tensors are quantised on the device; the host never holds more than a piece of one.
    """
    format = resolve_format(format, quantised=source.quantised, device=device)
    names, shapes = match_names(source, config), source.shapes()
    total = sum(source.size(name) for name in names.values())
    done = 0
    for canonical, name in names.items():
        weight = _read(source, name, canonical, shapes[name], format, device)
        if not _finite(weight):
            raise ModelFileError(f"{source.label}: tensor {name!r} holds NaN or infinite values; fetch the file again")
        yield canonical, source.dialect.convert(canonical, weight, config)
        done += source.size(name)
        if progress:
            progress(done, total)


def describe_weights(
    source: TensorSource, config: ModelConfig, *, format: Format = "auto", device: Device = "cpu"
) -> dict[str, Weight]:
    """Return all weights as they would be read, but without data: on torch's device "meta". Only headers are read."""
    format = resolve_format(format, quantised=source.quantised, device=device)
    names, shapes, blank = match_names(source, config), source.shapes(), source.blank()
    weights: dict[str, Weight] = {}
    rows: dict[object, Weight] = {}  # most tensors are alike
    for canonical, name in names.items():
        shape = shapes[name]
        alike = source.stored_type(name), shape[-1], len(shape), canonical in ENDS
        if alike not in rows:
            rows[alike] = _read(blank, name, canonical, shape if len(shape) == 1 else (1, shape[1]), format, "cpu")
        weights[canonical] = described(rows[alike], shape)
    return weights


def described(row: Weight, shape: tuple[int, ...]) -> Weight:
    """Return a tensor of this shape without data, in the format of one of its rows.

    Nothing is computed on the device "meta": torch imports its compiler for some operations there, which takes
    seconds."""
    if isinstance(row, Tensor):
        return torch.empty(shape, dtype=row.dtype, device="meta")
    return row.each(lambda part: torch.empty((shape[0], *part.shape[1:]), dtype=part.dtype, device="meta"))


def resolve_format(format: str, *, quantised: bool, device: Device = "cpu") -> Format:
    if format not in get_args(Format):
        raise UnknownOption("weight format", format, get_args(Format))
    if format == "auto":
        return "native" if quantised else "fp32" if torch.device(device).type == "cpu" else "bf16"
    return cast(Format, format)


def match_names(source: TensorSource, config: ModelConfig) -> dict[str, str]:
    """Map each canonical name to the file's name, in the order of the layers."""
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


def _read(
    source: TensorSource, name: str, canonical: str, shape: tuple[int, ...], format: Format, device: Device
) -> Weight:
    if len(shape) == 1:
        return source.read_float(name, 0, 1).to(device).float().flatten()
    rows = max(1, (CHUNK if torch.device(device).type == "cpu" else DEVICE_CHUNK) // shape[1])
    where = f"{source.label}: {name!r}"

    def piece(start: int, stop: int) -> Weight:
        if format == "native":
            return moved(source.read_native(name, start, stop), device)
        return in_format(source.read_float(name, start, stop).to(device), canonical, format=format, where=where)

    return _join([piece(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)])


def in_format(weight: Tensor, canonical: str, *, format: Format, where: str | None = None) -> Weight:
    """Convert a float tensor, or rows of one, to a format other than "auto" on its own device. Vectors stay floats."""
    assert format != "auto", "a format must be resolved first"
    if weight.dim() == 1:
        return weight.float()
    if format == "native":
        return weight
    if format in FLOATS:
        return weight.to(FLOATS[format])
    if format == "fp8":
        return quantise_fp8(weight)
    group = None if format == "int8" else GROUP
    bits = 8 if format == "int8" or (format == "int4" and canonical in ENDS) else 4
    if group and weight.shape[1] % group:
        raise UnsupportedModel(
            f"{where or repr(canonical)} has {weight.shape[1]} inputs; int4 needs a multiple of {group}, use int8"
        )
    return quantise(weight, bits=bits, group=group)


def moved(weight: Weight, device: Device) -> Weight:
    return weight.to(device) if isinstance(weight, Tensor) else weight.each(lambda part: part.to(device))


def weight_bytes(weight: Weight) -> int:
    """Count the bytes of a weight as kernels pack it: scales and minimums of groups in fp16, of channels in float32."""
    if isinstance(weight, Tensor):
        return weight.numel() * weight.itemsize
    if isinstance(weight, Float8):
        return weight.q.numel() + 4 * weight.scale.numel()
    return weight.q.numel() * weight.bits // 8 + weight.scale.numel() * (4 if weight.grouped else 8)


def _finite(weight: Weight) -> bool:
    """Whether all numbers are finite; scales and minimums of groups also in fp16, as kernels pack them."""
    if isinstance(weight, Tensor):
        return bool(weight.isfinite().all())
    if isinstance(weight, Float8):
        return bool(weight.scale.isfinite().all())
    parts = (weight.scale, weight.minimum) if weight.bits == 4 else (weight.scale,)
    return all(bool((part.half() if weight.grouped else part).isfinite().all()) for part in parts)


def _join(parts: list[Weight]) -> Weight:
    first = parts[0]
    if len(parts) == 1:
        return first
    assert len({type(part) for part in parts}) == 1, "rows of one tensor came in different formats"
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    if isinstance(first, Float8):
        eights = [part for part in parts if isinstance(part, Float8)]
        q = torch.cat([part.q.view(torch.uint8) for part in eights]).view(FP8)
        return Float8(q=q, scale=torch.cat([part.scale for part in eights]))
    pieces = [part for part in parts if isinstance(part, Quantised)]
    return Quantised(
        q=torch.cat([piece.q for piece in pieces]),
        scale=torch.cat([piece.scale for piece in pieces]),
        minimum=torch.cat([piece.minimum for piece in pieces]),
        bits=first.bits,
    )
