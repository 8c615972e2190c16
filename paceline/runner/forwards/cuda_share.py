"""The part that one rank has of a decoder that is split over the ranks of several GPUs.

Each rank has some heads and MLP columns, and adds its part of o and down to those of the others. It has the outputs of
some tokens, and gathers the logits of all. Embedding, norms and hidden states are whole, with the same bits on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.kernels.cuda.exchange import MUTED, Peers


@dataclass(frozen=True, slots=True)
class CudaShare:
    """A decoder's part, and the memory in which it meets the others."""

    peers: Peers
    parts: Mapping[str, int]  # of products, where they must be those of every other degree; see Packer
    columns: int  # logits of all ranks: tokens of the whole vocabulary

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let passes within the block meet nobody: sums have this rank's part alone, and results mean nothing.

        For rehearsals, which ranks do at different times and as often as they like."""
        muted = self.peers.status[MUTED : MUTED + 1]
        muted.fill_(1)
        try:
            yield
        finally:
            muted.fill_(0)
