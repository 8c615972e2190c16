"""From a model's name to something that runs: which Forward, and why that one.

On a CPU integer weights run as one compiled program; where no compiler can be had, or the kernels do not know the
shape, they are dequantised and run in torch. Float weights (fp32, bf16, fp8) always run in torch there, those of 8 bits
as float32. On a CUDA device every format has its kernels; activations are bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, NoCompiler, OutOfMemory, UnknownOption, UnsupportedModel
from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.kernels.cpu.build import load_library
from paceline.kernels.quant import GROUP, Float8, Quantised, dequantise
from paceline.models.load import LoadedModel, load_model
from paceline.models.shapes import random_weights, shape_config
from paceline.models.weights import Format, Progress, Weight, in_format, resolve_format, weight_bytes
from paceline.runner.forwards.compiled import CompiledForward, check_supported, kv_bytes_per_page
from paceline.runner.forwards.torch import TorchForward
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.runner.forwards.cuda import CudaDecoder

logger = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class WeightPart:
    """All weights of one format."""

    format: str
    tensors: int
    parameters: int
    bytes: int  # in memory, as they run


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model with its weights in memory, before it is told how many pages of KV it has."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer | None  # None: a shape with random weights
    compiled: bool
    why: str  # this way of running
    decoder: CudaDecoder | None = None  # has the weights, on a CUDA device
    kv_format: str = "bf16"  # there; on a CPU keys and values have the one of its kernels
    parts: Sequence[WeightPart] = ()  # what the weights are, the most bytes first; counted before a Forward has them
    pass_bytes: int = field(init=False)  # of weights that a forward pass reads; counted before a Forward has them

    def __post_init__(self) -> None:
        bytes = self.decoder.weight_bytes if self.decoder else _pass_bytes(self.model, packed=self.compiled)
        object.__setattr__(self, "pass_bytes", bytes)

    @property
    def device(self) -> str:
        return str(self.decoder.device) if self.decoder else "cpu"

    @property
    def page_bytes(self) -> int:
        """KV memory of one page."""
        config = self.model.config
        if self.compiled:
            return kv_bytes_per_page(config)
        slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        dtype = KV_DTYPES[self.kv_format] if self.decoder else _dtype(self.model)
        return PAGE_SIZE * slot * dtype.itemsize

    def profile(self, rows: int, outs: int) -> None:
        """Run the largest pass there will be, so that what is free afterwards may be used."""
        if self.decoder is not None:
            with memory_for(f"a pass of {rows} tokens of {self.name}", "lower max_step_tokens or max_sequences"):
                self.decoder.profile(rows, outs)

    def forward(self, *, num_pages: int, threads: int | None, max_context: int, taps: Sequence[int] = ()) -> Forward:
        """Builds the Forward; the weights are handed over to it."""
        config, weights = self.model.config, self.model.weights
        if self.decoder is not None:
            from paceline.runner.forwards.cuda import CudaForward, new_kv

            dtype, device = KV_DTYPES[self.kv_format], self.decoder.device
            kv = new_kv(config, num_pages=num_pages, dtype=dtype, device=device)
            return CudaForward(self.decoder, kv, taps=taps)
        try:
            if self.compiled:
                # What torch does between passes is small, and its idle threads would spin on the kernels' cores.
                torch.set_num_threads(1)
                return CompiledForward(
                    config, weights, num_pages=num_pages, threads=threads, max_context=max_context, taps=taps
                )
            torch.set_num_threads(threads or torch.get_num_threads())
            dtype = _dtype(self.model)
            for name, weight in weights.items():
                weights[name] = weight if isinstance(weight, Tensor) else dequantise(weight)
            return TorchForward(config, weights, num_pages=num_pages, dtype=dtype, taps=taps)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            size = num_pages * self.page_bytes / 2**20
            raise OutOfMemory(
                f"no memory for {self.name} with a KV cache of {size:.0f} MiB: lower kv_memory or max_context, or "
                "choose a smaller format such as int4"
            ) from error


def choose_device(name: str) -> str:
    """cpu or cuda, for what a user calls a device."""
    there = torch.cuda.is_available()
    if name not in DEVICES:
        raise UnknownOption("device", name, DEVICES)
    if name == "cuda" and not there:
        raise InvalidRequest("torch finds no CUDA device; use device cpu")
    return name if name != "auto" else "cuda" if there else "cpu"


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Says what did not fit on a CUDA device, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise OutOfMemory(
            f"no memory for {what}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free on the device; {advice}"
        ) from error


def read_model(
    name: str,
    *,
    format: Format = "auto",
    device: str = "cpu",
    kv_format: str = "bf16",
    progress: Progress | None = None,
) -> ReadyModel:
    _check_format(format, device)
    with memory_for(f"the weights of {name}", "choose a smaller format such as fp8 or int4, or a smaller model"):
        model = load_model(name, format=format, device=device, progress=progress)
        is_gguf = model.kind == "gguf"
        tokenizer = Tokenizer.from_gguf(model.metadata) if is_gguf else Tokenizer.from_directory(model.path)
        return _ready(name, model, tokenizer, device, kv_format)


def ready_shape(
    name: str, *, format: Format = "auto", device: str = "cpu", kv_format: str = "bf16", seed: int = 0
) -> ReadyModel:
    """A model of a known shape with random weights, for measurements; it has no tokenizer."""
    _check_format(format, device)
    config = shape_config(name)
    format = resolve_format(format, quantised=False, device=device)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    with memory_for(f"random weights of {name}", "choose a smaller format such as fp8 or int4"):
        drawn = random_weights(config, device=device, dtype=dtype, seed=seed)
        weights = {canonical: in_format(weight, canonical, format=format) for canonical, weight in drawn}
        model = LoadedModel(kind="hf", path=Path(name), config=config, weights=weights, metadata={}, generation={})
        return _ready(name, model, None, device, kv_format)


def _check_format(format: Format, device: str) -> None:
    """Activations decide: on a GPU a weight of 32 bits would only be rounded."""
    if format == "fp32" and torch.device(device).type == "cuda":
        allowed = [known for known in get_args(Format) if known != "fp32"]
        raise InvalidRequest(f"weights of format fp32 are for a CPU; on a GPU there are {', '.join(allowed)}")


def _ready(name: str, model: LoadedModel, tokenizer: Tokenizer | None, device: str, kv_format: str) -> ReadyModel:
    if torch.device(device).type == "cuda":
        kinds = sorted({_kind(weight) for weight in model.weights.values() if not _is_vector(weight)})
        parts = _parts(model, packed=True)
        decoder = _cuda_decoder(model, device)
        why = f"cuda: {torch.cuda.get_device_name(decoder.device)}, {' and '.join(kinds)} weights"
        return ReadyModel(
            name, model, tokenizer, compiled=False, why=why, decoder=decoder, kv_format=kv_format, parts=parts
        )
    if kv_format != "bf16":
        raise InvalidRequest(
            f"kv_format {kv_format!r} is for a GPU; on a CPU keys and values are as its kernels want them"
        )
    compiled, why = _choose(model)
    parts = _parts(model, packed=compiled)
    return ReadyModel(name=name, model=model, tokenizer=tokenizer, compiled=compiled, why=why, parts=parts)


def _cuda_decoder(model: LoadedModel, device: str) -> CudaDecoder:
    try:
        from paceline.runner.forwards.cuda import CudaDecoder
    except ModuleNotFoundError as error:
        raise UnsupportedModel("a CUDA device needs Triton: pip install triton, or use device cpu") from error
    return CudaDecoder(model.config, model.weights, max_context=model.config.max_context, device=device)


def _kind(weight: Weight) -> str:
    if isinstance(weight, Tensor):
        return "bf16"
    return "fp8" if isinstance(weight, Float8) else f"{weight.bits}-bit"


def _is_vector(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 1


def _choose(model: LoadedModel) -> tuple[bool, str]:
    if not any(isinstance(weight, Quantised) for weight in model.weights.values()):
        kind = "fp8" if isinstance(model.weights["embed"], Float8) else str(_dtype(model))
        return False, f"torch: {kind} weights have no compiled kernel; int8 or int4 would be faster on a CPU"
    try:
        check_supported(model.config)
        variant = load_library().variant
    except (NoCompiler, UnsupportedModel) as error:
        logger.warning("running in torch with float32 weights, which is slower: %s", error)
        return False, f"torch, float32: {error}"
    return True, f"compiled: quantised weights, {variant} kernels"


def _dtype(model: LoadedModel) -> torch.dtype:
    embed = model.weights["embed"]
    return embed.dtype if isinstance(embed, Tensor) else torch.float32


def _pass_bytes(model: LoadedModel, *, packed: bool) -> int:
    """An embedding that is not the head too is not read: a pass looks up a few of its rows."""
    read = [weight for name, weight in model.weights.items() if name != "embed" or model.config.tied_head]
    return sum(_bytes_in_use(weight, packed=packed) for weight in read)


def _parts(model: LoadedModel, *, packed: bool) -> list[WeightPart]:
    """`packed`: kernels read quantised weights as they are."""
    by_format: dict[str, list[Weight]] = {}
    for weight in model.weights.values():
        by_format.setdefault(_format_in_use(weight, packed=packed), []).append(weight)
    parts = [
        WeightPart(
            format=format,
            tensors=len(weights),
            parameters=sum(_values(weight).numel() for weight in weights),
            bytes=sum(_bytes_in_use(weight, packed=packed) for weight in weights),
        )
        for format, weights in by_format.items()
    ]
    return sorted(parts, key=lambda part: -part.bytes)


def _format_in_use(weight: Weight, *, packed: bool) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype).removeprefix("torch.")
    kind = "8-bit float" if isinstance(weight, Float8) else f"{weight.bits}-bit"
    grouped = isinstance(weight, Quantised) and weight.grouped
    name = f"{kind}, groups of {GROUP}" if grouped else f"{kind}, by channel"
    return name if packed else f"{name}, as float32"


def _bytes_in_use(weight: Weight, *, packed: bool) -> int:
    if isinstance(weight, Tensor) or packed:
        return weight_bytes(weight)
    return 4 * weight.q.numel()  # it will be dequantised


def _values(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.q
