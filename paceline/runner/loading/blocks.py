"""Load block drafters from their directories to run beside a target: on a CPU compiled or in torch, or on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.errors import UnsupportedModel
from paceline.kernels.base import Forward
from paceline.kernels.kv_tensors import page_bytes
from paceline.models.block_heads import BlockHead, load_block
from paceline.models.shapes import random_block
from paceline.models.weights import weight_bytes
from paceline.runner.forwards.compiled import CompiledForward, check_supported, kv_bytes_per_page
from paceline.runner.heads.block import TorchBlock
from paceline.runner.heads.compiled_block import CompiledBlock
from paceline.runner.heads.protocol import BlockForward
from paceline.runner.loading.heads import context_note, mask_note, output_bytes
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel

if TYPE_CHECKING:
    from paceline.runner.forwards.cuda import CudaDecoder
    from paceline.runner.heads.cuda_block import CudaBlock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyBlock:
    """A block drafter that can be built. The number of KV pages is fixed by `forward`, which reads the weights."""

    head: BlockHead  # without data, in the format in which it runs
    read: Callable[[], BlockHead]  # reads it
    compiled: bool
    shared_bytes: int  # bytes of the target's output layer, where the drafter uses it
    dtype: torch.dtype = torch.float32  # type of activations, keys and values; unused if compiled
    note: str = ""  # what users should know about how it runs

    @property
    def why(self) -> str:
        config = self.head.config
        size = f"{self.head.parameters / 1e6:.1f} M parameters, {config.draft_vocab_size} tokens"
        flags = "".join(f", {flag}" for flag in config.flags)
        states = f"hidden states {', '.join(map(str, config.taps))}"
        how = "compiled" if self.compiled else f"torch, {str(self.dtype).removeprefix('torch.')}"
        return f"a {config.kind} block drafter ({size}{flags}) on {states}: {how}{self.note and f'; {self.note}'}"

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
        """Bytes of weights that a draft pass reads: all but `fc`, and but rows of the matrices that tokens look up."""
        looked_up = ("embed", "fc", "markov.before", "selector.before", "selector.after")
        own = sum(weight_bytes(weight) for name, weight in self.head.weights.items() if name not in looked_up)
        return own + self.shared_bytes

    def on_cuda(self, target: CudaDecoder, *, max_context: int) -> CudaBlock:
        """Load the weights to the target's CUDA device. The drafter has no KV memory yet."""
        from paceline.runner.heads.cuda_block import CudaBlock, check_on_cuda

        check_on_cuda(self.head.config)
        with memory_for("the weights of a block drafter", "take a smaller model, or another drafter"):
            return CudaBlock(self.read(), target, max_context=max_context)

    def forward(self, target: Forward, *, num_pages: int, max_context: int, threads: int | None) -> BlockForward:
        if not self.compiled:
            return TorchBlock(self.read(), target, num_pages=num_pages)
        assert isinstance(target, CompiledForward), "compiled beside a target that is not"
        return CompiledBlock(self.read(), target, num_pages=num_pages, max_context=max_context, threads=threads)


def read_block(directory: Path, target: ReadyModel) -> ReadyBlock:
    """Read the headers of a block drafter."""
    config = target.model.config
    return _ready(load_block(directory, config, blank=True), lambda: load_block(directory, config), target)


def shape_of_block(target: ReadyModel) -> ReadyBlock:
    """Make a block drafter of random weights that fits any target, for measurements."""
    dtype = torch.float32 if target.decoder is None else torch.bfloat16
    head = random_block(target.model.config, device=target.device, dtype=dtype)
    return _ready(head, lambda: head, target)


def _ready(head: BlockHead, read: Callable[[], BlockHead], target: ReadyModel) -> ReadyBlock:
    """Choose how a block drafter runs. `head` may be without data; `read` reads it."""
    compiled, config = target.has_whole_program and _fits_kernels(head), head.config
    notes = [*config.notes, context_note(config.decoder, target), mask_note(config.mask_token, target)]
    return ReadyBlock(
        head.quantised() if compiled else head.in_floats(),
        lambda: read().quantised() if compiled else read().in_floats(),
        compiled=compiled,
        shared_bytes=0 if "head" in head.weights else output_bytes(target),
        dtype=torch.float32 if target.decoder is None else torch.bfloat16,
        note="; ".join(filter(None, notes)),
    )


def _fits_kernels(head: BlockHead) -> bool:
    """Return whether the kernels have all operations of the network; if not, say in the log what they lack."""
    try:
        check_supported(head.config.decoder)
    except UnsupportedModel as error:
        logger.warning("the block drafter runs in torch, which is slower: %s", error)
        return False
    return True
