"""Load heads from their directories to run beside a target: compiled with the target's kernels, or in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.errors import UnsupportedModel
from paceline.kernels.base import Forward
from paceline.kernels.cpu.pack import Pack
from paceline.kernels.kv_tensors import page_bytes
from paceline.kernels.quant import GROUP
from paceline.models.config import ModelConfig
from paceline.models.heads import EagleHead, MedusaHead, load_eagle, load_medusa
from paceline.models.shapes import random_eagle
from paceline.models.weights import weight_bytes
from paceline.runner.forwards.compiled import CompiledForward, check_supported, kv_bytes_per_page
from paceline.runner.forwards.decoder_pack import output_layer
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.head_pack import fill_head, head_layout
from paceline.runner.heads.medusa import CompiledMedusa, TorchMedusa
from paceline.runner.heads.protocol import HeadForward, MedusaForward
from paceline.runner.heads.torch import TorchHead
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel
from paceline.runner.loading.pack_cache import Origin, cached

if TYPE_CHECKING:
    from paceline.runner.forwards.cuda import CudaDecoder
    from paceline.runner.heads.cuda import CudaHead

logger = logging.getLogger(__name__)


class LoadHead(Protocol):
    """A function that reads a head for a target; `blank`: its tensors are without data."""

    def __call__(self, directory: Path, target: ModelConfig, *, blank: bool) -> EagleHead: ...


FORMATS = ("int8", "int4")  # weight formats of compiled heads
DEFAULT_FORMAT = "int4"  # a draft need not be exact, and its cost is the weights that it reads


@dataclass(frozen=True, slots=True)
class ReadyHead:
    """An EAGLE head that can be built. The number of KV pages is fixed by `forward`, which reads the weights."""

    head: EagleHead  # without data, in the format in which it runs
    read: Callable[[], EagleHead]  # reads it
    format: str
    compiled: bool
    device: str
    dtype: torch.dtype  # type of activations in torch; unused if compiled
    shared_bytes: int = 0  # bytes of the target's output layer, where the head uses it
    note: str = ""  # what users should know about how it runs

    @property
    def why(self) -> str:
        config = self.head.config
        how = "compiled" if self.compiled else f"torch, {str(self.dtype).removeprefix('torch.')}"
        size = f"{self.head.parameters / 1e6:.1f} M parameters, {config.draft_vocab_size} tokens"
        flags = "".join(f", {flag}" for flag in config.flags)
        article = "a" if config.kind.startswith("P") else "an"
        states = f"hidden states {', '.join(map(str, config.taps))}"
        return f"{article} {config.kind} head ({size}{flags}) on {states}: {how}{self.note and f'; {self.note}'}"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV memory."""
        layers = self.head.config.decoder
        if self.compiled:
            return kv_bytes_per_page(layers)
        return page_bytes(layers.num_layers, layers.num_kv_heads, layers.head_dim, self.dtype)

    @property
    def own_bytes(self) -> int:
        """Bytes of the head's own weights in memory."""
        stored = sum(map(weight_bytes, self.head.weights.values()))
        return stored if self.compiled else stored * self.dtype.itemsize // torch.float32.itemsize

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a draft pass reads: all but `fc` and the embedding, of which it reads a few rows."""
        own = sum(weight_bytes(weight) for name, weight in self.head.weights.items() if name not in ("embed", "fc"))
        return own + self.shared_bytes

    def on_cuda(self, target: CudaDecoder, *, max_context: int) -> CudaHead:
        """Load the weights to the target's CUDA device. The head has no KV memory yet."""
        from paceline.runner.heads.cuda import CudaHead

        with memory_for("the weights of an EAGLE head", "take a smaller model, or another drafter"):
            return CudaHead(self.read(), target, max_context=max_context)

    def forward(
        self, target: Forward, *, num_pages: int, max_context: int, threads: int | None, prefetch: bool = True
    ) -> HeadForward:
        """`prefetch`: see CompiledHead."""
        if self.compiled:
            assert isinstance(target, CompiledForward)
            pack = self._packed(threads or target.threads)
            return CompiledHead(
                self.head,
                target,
                num_pages=num_pages,
                max_context=max_context,
                threads=threads,
                pack=pack,
                prefetch=prefetch,
            )
        return TorchHead(self.read(), target, num_pages=num_pages, dtype=self.dtype, device=self.device)

    def _packed(self, threads: int) -> Pack:
        """Return the weights as the kernels read them, from the cache if they are there."""
        origin = Origin(str(self.head.files[0].parent), self.head.files, self.format, self.head.config)
        return cached(head_layout(self.head), origin, lambda pack: fill_head(pack, self.read()), threads=threads)


@dataclass(frozen=True, slots=True)
class ReadyMedusa:
    """Medusa heads with their weights in memory."""

    heads: list[MedusaHead]
    compiled: bool
    device: str
    dtype: torch.dtype  # type of activations in torch; unused if compiled
    note: str = ""  # what users should know about how they run

    @property
    def why(self) -> str:
        how = "compiled" if self.compiled else f"torch, {str(self.dtype).removeprefix('torch.')}"
        return f"{len(self.heads)} Medusa heads on the last hidden state: {how}{self.note and f'; {self.note}'}"

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        weights = [weight for head in self.heads for weight in (head.head, *(block[0] for block in head.blocks))]
        return sum(weight_bytes(weight) for weight in weights)

    def forward(self, *, threads: int | None) -> MedusaForward:
        if self.compiled:
            return CompiledMedusa(self.heads, threads=threads)
        return TorchMedusa(self.heads, dtype=self.dtype, device=self.device)


def read_medusa(directory: Path, target: ReadyModel, *, format: str | None) -> ReadyMedusa:
    """Load Medusa heads. `format` is that of compiled weights, None: as usual; in torch they are floats."""
    heads = load_medusa(directory, target.model.config)
    if target.compiled and target.model.config.hidden_size % GROUP == 0:
        own = format or DEFAULT_FORMAT
        return ReadyMedusa([head.in_format(own) for head in heads], True, "cpu", torch.float32)
    dtype, note = torch.float32 if target.decoder is None else torch.bfloat16, _format_note(format, compiled=False)
    return ReadyMedusa([head.in_format("fp32") for head in heads], False, target.device, dtype, note)


def read_eagle(directory: Path, target: ReadyModel, *, format: str | None, load: LoadHead = load_eagle) -> ReadyHead:
    """Read the headers of an EAGLE head, or of another that `load` reads. `format` is that of compiled weights, None:
    as usual; in torch they are floats."""
    config = target.model.config
    head = load(directory, config, blank=True)
    compiled = target.has_whole_program and _fits_kernels(head)
    own = (format or DEFAULT_FORMAT) if compiled else "fp32"
    note = "; ".join(filter(None, (_note(head, target), _format_note(format, compiled=compiled))))
    return ReadyHead(
        head.in_format(own),
        lambda: load(directory, config, blank=False).in_format(own),
        format=own,
        compiled=compiled,
        device="cpu" if compiled else target.device,
        dtype=torch.float32 if target.decoder is None else torch.bfloat16,
        shared_bytes=0 if "head" in head.weights else output_bytes(target),
        note=note,
    )


def _format_note(format: str | None, *, compiled: bool) -> str:
    """Say, here and in the log, that a format that was asked for is not used; else return nothing."""
    if format is None or compiled:
        return ""
    note = f"format {format} is not used: it is one of heads that run compiled on a CPU"
    logger.warning("the head: %s", note)
    return note


def _note(head: EagleHead, target: ReadyModel) -> str:
    """Say what a user of this head beside this target should know, here and in the log."""
    notes = [*head.config.notes, context_note(head.config.decoder, target), mask_note(head.config.mask_token, target)]
    if head.config.mask_token is not None and target.decoder is not None:
        notes.append("on a GPU P-EAGLE takes one pass a token, not one a draft")
        logger.warning("the head: %s", notes[-1])
    return "; ".join(filter(None, notes))


def context_note(layers: ModelConfig, target: ReadyModel) -> str:
    """Say, here and in the log, that a head was trained for less context than the target has; else return nothing."""
    context, longest = layers.max_context, target.model.config.max_context
    if context >= longest:
        return ""
    note = f"trained for {context} tokens of context, the target's {longest}: acceptance may fall beyond"
    logger.warning("the head: %s", note)
    return note


def mask_note(token: int | None, target: ReadyModel) -> str:
    """Say that drafted positions read a row of the embedding that is no token of the target, as published heads do."""
    if token is None or target.tokenizer is None or token < target.tokenizer.vocab_size:
        return ""
    return f"its mask {token} is a padding row of the embedding, behind the {target.tokenizer.vocab_size} tokens"


def output_bytes(target: ReadyModel) -> int:
    """Return the bytes of the target's output layer."""
    if target.decoder is not None:
        return target.decoder.head.bytes
    weights = target.model.weights
    return weight_bytes(weights[output_layer(weights)])


def shape_of_eagle(target: ReadyModel, *, draft_vocab: int) -> ReadyHead:
    """Make a head of random weights that fits any target, for measurements."""
    config = target.model.config
    dtype = torch.float32 if target.decoder is None else torch.bfloat16
    head = random_eagle(config, draft_vocab=min(draft_vocab, config.vocab_size), device=target.device, dtype=dtype)
    return ReadyHead(head, lambda: head, format="fp32", compiled=False, device=target.device, dtype=dtype)


def _fits_kernels(head: EagleHead) -> bool:
    try:
        check_supported(head.config.decoder)
    except UnsupportedModel as error:
        logger.warning("the head runs in torch, which is slower: %s", error)
        return False
    return True
