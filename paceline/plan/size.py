"""Sizes of a model as it runs on a GPU: bytes in memory and bytes a pass reads, from headers and shapes alone.

No weight is read and no model is fetched. What a GPU makes of quantised weights follows docs/gpu.md: groups are
expanded to 16 bits, and 8-bit floats have 16 bits beside them, where all weights in 16 bits take at most a quarter of
its memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, ModelNotFound
from paceline.kernels.quant import FLOATS_SHARE, Float8, Quantised, Weight, values_of
from paceline.models.config import ModelConfig
from paceline.models.hub.names import hub_name
from paceline.models.hub.store import find
from paceline.models.load import open_model
from paceline.models.precision import format_name
from paceline.models.resolve import KNOWN
from paceline.models.shapes import is_shape, shape_config
from paceline.models.tensor_names import expected_shapes
from paceline.models.weights import Format, describe_weights, described, in_format, resolve_format, weight_bytes

FEW_ROWS = 64  # rows up to which 8-bit floats are read as they are
MANY_ROWS = 256  # rows from which quantised weights are expanded in a product
KV_BYTES = {"bf16": 2, "fp8": 1}  # of one number


@dataclass(frozen=True, slots=True)
class Reading:
    """How passes up to some number of rows use the matrices."""

    bytes: int  # read by a pass
    narrow: bool = False  # products compute with fewer bits than 16


@dataclass(frozen=True, slots=True)
class ModelSize:
    name: str
    config: ModelConfig
    format: str  # of most matrices, in words
    matrices: int  # bytes in memory
    vectors: int  # bytes in memory
    few: Reading  # passes of less than `many_rows`
    many: Reading
    many_rows: int
    inner_products: int  # weights that every row is multiplied with
    head_products: int  # weights that a row with logits is multiplied with
    kv_number: int  # bytes of a number in KV memory

    @property
    def parameters(self) -> int:
        shared = 0 if self.config.tied_head else self.config.vocab_size * self.config.hidden_size
        return self.inner_products + self.head_products + shared

    def reading(self, rows: float) -> Reading:
        return self.few if rows < self.many_rows else self.many

    def kv_token(self, ranks: int = 1) -> int:
        """Count the bytes of KV memory of one token on each rank."""
        heads = max(1, self.config.num_kv_heads // ranks)
        return 2 * self.config.num_layers * heads * self.config.head_dim * self.kv_number

    def check_degree(self, ranks: int, *, option: str, most: int) -> None:
        """Raise InvalidRequest if the model cannot be split over so many ranks. `most`: that are possible at all."""
        degrees = possible_degrees(self.config, most)
        if ranks not in degrees:
            raise InvalidRequest(
                f"{option} {ranks}: {self.name} has {self.config.num_heads} attention heads and "
                f"{self.config.num_kv_heads} key/value heads, and can be split over {_listed(degrees)} ranks only"
            )

    def seen(self, context: float) -> float:
        """Return the tokens of context that a row reads, in the mean of all layers."""
        windows = self.config.windows or (0,)
        return sum(min(context, window or context) for window in windows) / len(windows)


def possible_degrees(config: ModelConfig, most: int) -> list[int]:
    """List the numbers of ranks over which the heads can be split evenly; key/value heads may be on several ranks."""
    heads, kv = config.num_heads, config.num_kv_heads
    return [ranks for ranks in range(1, most + 1) if heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)]


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def read_weights(name: str, *, format: Format) -> tuple[ModelConfig, Mapping[str, Weight]]:
    """Describe the weights of a model that is here, or of a shape, in the format that a GPU would load."""
    if format == "fp32":
        raise InvalidRequest(
            "weights of format fp32 are for a CPU; a GPU has bf16, fp8, int8, int4, int4-all and native"
        )
    if is_shape(name):
        config = shape_config(name)
        return config, shape_weights(config, format=resolve_format(format, quantised=False, device="cuda"))
    check_here(name)
    model = open_model(name)
    return model.config, describe_weights(model.source, model.config, format=format, device="cuda")


def shape_weights(config: ModelConfig, *, format: Format) -> dict[str, Weight]:
    rows = {name: shape if len(shape) == 1 else (1, shape[1]) for name, shape in expected_shapes(config).items()}
    made: dict[tuple[bool, tuple[int, ...]], Weight] = {}  # most tensors are alike
    for name, row in rows.items():
        key = name in ("embed", "head"), row
        if key not in made:
            made[key] = in_format(torch.zeros(row, dtype=torch.bfloat16), name, format=format)
    shapes = expected_shapes(config)
    return {name: described(made[name in ("embed", "head"), row], shapes[name]) for name, row in rows.items()}


def check_here(name: str) -> None:
    """Raise ModelNotFound for a model of the hub that is not on this machine: a plan fetches nothing."""
    on_hub = None if name in KNOWN or os.path.exists(os.path.expanduser(name)) else hub_name(name)
    if on_hub is not None and find(on_hub) is None:
        raise ModelNotFound(
            f"{name!r} is not on this machine, and a plan fetches nothing: type `paceline pull {name}`, or plan for "
            "one of the shapes of `paceline bench engine`, or for a config.json"
        )


def model_size(name: str, *, format: Format, kv_format: str, memory: float) -> ModelSize:
    """Size a model. `memory`: bytes of all GPUs that hold it together."""
    config, weights = read_weights(name, format=format)
    return size_of(name, config, weights, kv_number=KV_BYTES[kv_format], memory=memory)


def size_of(
    name: str, config: ModelConfig, weights: Mapping[str, Weight], *, kv_number: int, memory: float
) -> ModelSize:
    matrices = {name: weight for name, weight in weights.items() if values_of(weight).dim() == 2}
    vectors = sum(weight_bytes(weight) for name, weight in weights.items() if name not in matrices)
    read = {name: weight for name, weight in matrices.items() if name != "embed" or config.tied_head}
    numbers = sum(values_of(weight).numel() for weight in matrices.values())
    few, many, rows, more = _readings(read, room=2 * numbers <= FLOATS_SHARE * memory)
    head = config.vocab_size * config.hidden_size
    return ModelSize(
        name=name,
        config=config,
        format=_format(matrices),
        matrices=sum(map(_stored, matrices.values())) + more,
        vectors=vectors,
        few=few,
        many=many,
        many_rows=rows,
        inner_products=sum(values_of(weight).numel() for weight in read.values()) - head,
        head_products=head,
        kv_number=kv_number,
    )


def _readings(read: Mapping[str, Weight], *, room: bool) -> tuple[Reading, Reading, int, int]:
    """Return how passes of few and of many rows read, from how many rows on, and the bytes in memory more."""
    own = sum(map(_stored, read.values()))
    floats = 2 * sum(values_of(weight).numel() for weight in read.values())
    kinds = {_kind(weight) for weight in read.values()}
    if kinds == {"float"}:
        return Reading(own), Reading(own), 1, 0
    if "channel" in kinds:  # tiles of few rows whatever the rows
        return Reading(own, narrow=True), Reading(own, narrow=True), 1, 0
    if room and "group" in kinds:
        return Reading(floats), Reading(floats), 1, floats - own
    if room:
        return Reading(own, narrow=True), Reading(floats), FEW_ROWS + 1, floats
    return Reading(own, narrow=True), Reading(own + 2 * floats), MANY_ROWS, 0  # written and read in every product


def _kind(weight: Weight) -> str:
    if isinstance(weight, Quantised):
        return "group" if weight.grouped else "channel"
    return "float8" if isinstance(weight, Float8) else "float"


def _stored(weight: Weight) -> int:
    """Bytes on a GPU, where floats have 16 bits."""
    return 2 * weight.numel() if isinstance(weight, Tensor) else weight_bytes(weight)


def _format(matrices: Mapping[str, Weight]) -> str:
    """Name the format that most numbers have."""
    numbers: Counter[str] = Counter()
    for weight in matrices.values():
        numbers["bf16" if isinstance(weight, Tensor) else format_name(weight)] += values_of(weight).numel()
    return numbers.most_common(1)[0][0]
