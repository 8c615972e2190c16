"""How fast a model would run in other formats on this CPU, measured without its weights.

The layers of a model are alike, and the values of weights do not matter: a few layers of constant numbers are timed,
and the rest follows from the bytes that a pass reads. No format of a target is chosen by this: another format is
another text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import memset
from typing import cast

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.pack import Pack
from paceline.kernels.cpu.pool import default_threads
from paceline.models.config import ModelConfig
from paceline.models.load import layer_of, leading_weights
from paceline.models.weights import Format, Weight, describe_weights, weight_bytes
from paceline.runner.forwards.compiled import Programs, shape_of
from paceline.runner.forwards.decoder_pack import decoder_layout
from paceline.runner.forwards.measuring import RunPass, Times, times_of
from paceline.runner.loading.models import ReadyModel

FORMATS: tuple[Format, ...] = ("int8", "int4", "int4-all")  # formats that every model can have in compiled kernels
TRIAL_BYTES = 192 << 20  # weights of the layers that are timed: more than caches hold
CONSTANT = 0x3C  # byte of all weights: scales of it are near 1 in fp16, and small in float32


def format_times(ready: ReadyModel, formats: Sequence[Format]) -> Times | None:
    """Return the seconds of a pass over one token in each format; None: the machine is too busy to measure."""
    assert ready.stored is not None, f"{ready.name} has no files to describe"
    config, source = ready.model.config, ready.stored.source
    question = "formats", config, ready.stored.format, load_library().variant
    described = {format: describe_weights(source, config, format=format) for format in formats}
    few = min(_layers_in(TRIAL_BYTES, weights, config) for weights in described.values())
    small = config.leading(few)
    times = times_of(
        question, formats, lambda format: _trial(small, leading_weights(described[cast(Format, format)], few))
    )
    if times is None:
        return None
    return {
        format: seconds * _growth(described[cast(Format, format)], config, few) for format, seconds in times.items()
    }


def _trial(config: ModelConfig, weights: Mapping[str, Weight]) -> RunPass:
    """Return a function that runs a pass over one token with constant weights."""
    threads = default_threads()
    pack = Pack(decoder_layout(weights), threads=threads)
    memset(pack.memory.address, CONSTANT, pack.layout.size)
    shape = shape_of(config, pages=1, positions=PAGE_SIZE)
    kv = CpuKV(pack.library, shape)
    return Programs(config, pack, shape, kv, (), library=pack.library).trial(threads, rows=1)


def _bytes_read(weights: Mapping[str, Weight], config: ModelConfig) -> int:
    """Count the bytes that a pass reads; of an embedding that is not the head too, it reads a row."""
    return sum(weight_bytes(weight) for name, weight in weights.items() if name != "embed" or config.tied_head)


def _layers_in(size: int, weights: Mapping[str, Weight], config: ModelConfig) -> int:
    """Count the layers whose weights have at most `size` bytes; at least one."""
    layer = sum(weight_bytes(weight) for name, weight in weights.items() if layer_of(name) == 0)
    return max(1, min(config.num_layers, size // layer))


def _growth(weights: Mapping[str, Weight], config: ModelConfig, few: int) -> float:
    """Return how many times the bytes of a few layers and the head a whole pass reads."""
    return _bytes_read(weights, config) / _bytes_read(leading_weights(weights, few), config)
