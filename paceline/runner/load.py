"""From a model's name to something that runs: which Forward, and why that one.

Integer weights run as one compiled program; where no compiler can be had, or the kernels do not know the shape, they
are dequantised and run in torch. Float weights (fp32, bf16, fp8) always run in torch, those of 8 bits as float32.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import OutOfMemory, UnsupportedModel
from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.kernels.cpu.build import NoCompiler, load_library
from paceline.kernels.quant import Float8, Quantised, dequantise
from paceline.models.load import LoadedModel, load_model
from paceline.models.weights import Format, Progress, Weight, weight_bytes
from paceline.runner.compiled import CompiledForward, check_supported, kv_bytes_per_page
from paceline.runner.eager import EagerForward
from paceline.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model with its weights in memory, before it is told how many pages of KV it has."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer
    compiled: bool
    why: str  # this way of running
    pass_bytes: int = field(init=False)  # of weights that a forward pass reads; counted before a Forward has them

    def __post_init__(self) -> None:
        object.__setattr__(self, "pass_bytes", _pass_bytes(self.model, compiled=self.compiled))

    @property
    def page_bytes(self) -> int:
        """KV memory of one page."""
        config = self.model.config
        if self.compiled:
            return kv_bytes_per_page(config)
        slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return PAGE_SIZE * slot * _dtype(self.model).itemsize

    def forward(self, *, num_pages: int, threads: int | None, max_context: int) -> Forward:
        """Builds the Forward; the weights are handed over to it."""
        config, weights = self.model.config, self.model.weights
        try:
            if self.compiled:
                # What torch does between passes is small, and its idle threads would spin on the kernels' cores.
                torch.set_num_threads(1)
                return CompiledForward(config, weights, num_pages=num_pages, threads=threads, max_context=max_context)
            torch.set_num_threads(threads or torch.get_num_threads())
            dtype = _dtype(self.model)
            for name, weight in weights.items():
                weights[name] = weight if isinstance(weight, Tensor) else dequantise(weight)
            return EagerForward(config, weights, num_pages=num_pages, dtype=dtype)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            size = num_pages * self.page_bytes / 2**20
            raise OutOfMemory(
                f"no memory for {self.name} with a KV cache of {size:.0f} MiB: lower kv_memory or max_context, or "
                "choose a smaller format such as int4"
            ) from error


def read_model(name: str, *, format: Format = "auto", progress: Progress | None = None) -> ReadyModel:
    model = load_model(name, format=format, progress=progress)
    is_gguf = model.kind == "gguf"
    tokenizer = Tokenizer.from_gguf(model.metadata) if is_gguf else Tokenizer.from_directory(model.path)
    compiled, why = _choose(model)
    return ReadyModel(name=name, model=model, tokenizer=tokenizer, compiled=compiled, why=why)


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


def _pass_bytes(model: LoadedModel, *, compiled: bool) -> int:
    """An embedding that is not the head too is not read: a pass looks up a few of its rows."""
    read = [weight for name, weight in model.weights.items() if name != "embed" or model.config.tied_head]
    return sum(_bytes_in_use(weight, compiled=compiled) for weight in read)


def _bytes_in_use(weight: Weight, *, compiled: bool) -> int:
    if isinstance(weight, Tensor) or compiled or weight.q.is_cuda:
        return weight_bytes(weight)
    return 4 * weight.q.numel()  # it will be dequantised
