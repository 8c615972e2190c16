"""Protocols of heads that run: `HeadForward` and `TreeHead` for EAGLE, `MedusaForward` for Medusa, `BlockForward` for
block drafters; and of programs that draft trees, `TreeDrafter`.

A pass of an EAGLE head computes a Batch, as a pass of any Forward does, but row r combines the hidden state of its
position with the *next* token. Its key and value go to the slot of its position. With `features`, the states are the
target's, [rows, taps * hidden]. With `carry`, row r continues from row carry[r] of the head's last pass; `carry`
ascends. A head with a `mask` continues from nothing: then tokens and states of such rows are those of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.kernels.base import Batch, KVMemory, Output
from paceline.runner.heads.mask_row import MaskRow


class StateReader(Protocol):
    """A head that reads the target's hidden states into keys and values of its own."""

    device: torch.device | str  # device that features must be on

    def __call__(self, batch: Batch, *, features: Tensor) -> object:
        """Read the hidden states [rows, taps * hidden] of the rows of a batch."""


class ReadingHead(Protocol):
    """A head with KV memory of its own, into which it reads the target's hidden states, whoever runs its passes."""

    ids: Tensor  # int32 [draft vocabulary]: the target's token for each output

    @property
    def kv(self) -> KVMemory: ...


class Head(ReadingHead, Protocol):
    """An EAGLE head."""

    mask: MaskRow | None  # input of drafted positions in P-EAGLE; None: they continue from those before


class Outputs(Protocol):
    """The outputs of a head: tokens of the target, drawn with the noise of the target's tokens."""

    ids: Tensor  # int32 [draft vocabulary]: the target's token for each output

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        """Draw outputs as `Forward.pick` does, with the noise of the target's tokens."""


class HeadForward(Head, Outputs, Protocol):
    """An EAGLE head that runs one pass at a time."""

    device: torch.device | str  # device that features must be on

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        """Run a pass. Logits and argmax are over the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """Limits and filters of one sequence's draft.

    The draft has the head's best tokens, or those that the noise of the batch and the filters draw. A head may apply
    filters approximately: a token that they should have excluded is rejected like any wrong guess.
    """

    limit: int  # tokens of the draft, at least 1
    min_confidence: float  # a token is dropped if the confidence in its whole path is lower
    level_price: float  # the tree ends at a level that is expected to add less confidence, less the prices of its rows
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    row_prices: tuple[float, ...] = ()  # confidence at which the first, second … token pays for its row; (): 0 for all


class TreeDrafter(Protocol):
    """A head or a model that drafts several tokens without the host between them."""

    def draft(self, batch: Batch, features: Tensor | None, wanted: Sequence[TreeRequest], *, width: int) -> list[Tree]:
        """Draft one tree for each sequence of the batch, which asks for logits of its last row alone.

        A head reads `features`, a model none. A node has at most `width` children. Tokens are drawn with the batch's
        seeds and inverse_temperatures."""


@runtime_checkable
class TreeHead(HeadForward, TreeDrafter, Protocol):
    """A head that drafts trees."""


class Tree(NamedTuple):
    """A draft as a head returns it."""

    tokens: list[int]  # of the target's vocabulary
    parents: list[int]  # as in Draft
    passes: int  # passes that it took
    confidence: list[float]  # probability that each token and all its ancestors are accepted


class MedusaForward(Protocol):
    """Medusa heads that run. They have no keys, values or positions."""

    depth: int  # number of heads
    device: torch.device | str  # device that features must be on

    def __call__(self, features: Tensor) -> Tensor:
        """Compute logits float32 [heads, n, vocab], on the host, from hidden states [n, hidden]; the next call reuses
        their memory."""


class Anchor(NamedTuple):
    """The last committed token of a sequence, which a block begins with, and the draft that is wanted after it."""

    token: int
    position: int
    pages: Sequence[int]  # pages of the positions before it
    tokens: int  # tokens of the draft


class BlockRows(Protocol):
    """The rows of one drafted block. They are asked for once each, in order; both calls get the token before."""

    def logits(self, row: int, before: int) -> Tensor:
        """Compute logits float32 [1, draft vocabulary] of the row's token, on the host."""

    def best(self, row: int) -> int:
        """Return the best output of the row, whose logits have been asked for."""

    def confidence(self, row: int, before: int) -> float | None:
        """Estimate how likely the row's token is accepted, if all before it are; None: it has no estimate."""


class BlockForward(StateReader, Outputs, Protocol):
    """A block drafter that runs. Called as a StateReader, it reads the context."""

    @property
    def kv(self) -> KVMemory: ...

    def probability(self, logits: Tensor, place: int) -> float:
        """Compute the softmax of logits float32 [1, n] at `place`."""

    def blocks(self, anchors: Sequence[Anchor]) -> list[BlockRows]:
        """Run one pass over a block after each anchor, whose context must have been read. The rows of a block are
        those of its drafted tokens."""
