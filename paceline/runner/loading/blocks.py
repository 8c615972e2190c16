"""Load block drafters from their directories to run beside a target on a CPU, in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.kernels.base import Forward
from paceline.kernels.kv_tensors import page_bytes
from paceline.models.block_heads import BlockHead, load_block
from paceline.models.weights import weight_bytes
from paceline.runner.heads.block import TorchBlock
from paceline.runner.loading.heads import context_note, output_bytes
from paceline.runner.loading.models import ReadyModel


@dataclass(frozen=True, slots=True)
class ReadyBlock:
    """A block drafter that can be built. The number of KV pages is fixed by `forward`, which reads the weights."""

    head: BlockHead  # without data, in the format in which it runs
    read: Callable[[], BlockHead]  # reads it
    shared_bytes: int  # bytes of the target's output layer, where the drafter uses it
    note: str = ""  # what users should know about how it runs

    @property
    def why(self) -> str:
        config = self.head.config
        size = f"{self.head.parameters / 1e6:.1f} M parameters, {config.draft_vocab_size} tokens"
        flags = "".join(f", {flag}" for flag in config.flags)
        states = f"hidden states {', '.join(map(str, config.taps))}"
        return (
            f"a {config.kind} block drafter ({size}{flags}) on {states}: torch, float32{self.note and f'; {self.note}'}"
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV memory."""
        layers = self.head.config.decoder
        return page_bytes(layers.num_layers, layers.num_kv_heads, layers.head_dim, torch.float32)

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a draft pass reads: all but `fc`, and but rows of the matrices that tokens look up."""
        looked_up = ("embed", "fc", "markov.before", "selector.before", "selector.after")
        own = sum(weight_bytes(weight) for name, weight in self.head.weights.items() if name not in looked_up)
        return own + self.shared_bytes

    def forward(self, target: Forward, *, num_pages: int) -> TorchBlock:
        return TorchBlock(self.read(), target, num_pages=num_pages)


def read_block(directory: Path, target: ReadyModel) -> ReadyBlock:
    """Read the headers of a block drafter."""
    config = target.model.config
    head = load_block(directory, config, blank=True)
    return ReadyBlock(
        head.in_floats(),
        lambda: load_block(directory, config).in_floats(),
        shared_bytes=0 if "head" in head.weights else output_bytes(target),
        note=context_note(head.config.decoder, target),
    )
