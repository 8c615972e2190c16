"""The contract of a forward pass: its input, its output, and what every implementation offers.

The words of one pass: a *row* is one token to be computed; the rows of a sequence are adjacent. Row r of sequence s
holds `tokens[r]` at `positions[r]` and its key and value go to KV slot `slots[r]` (= page * PAGE_SIZE + offset).

    rows        0 1 2 │ 3 │ 4 5 6 7        row_starts = [0, 3, 4, 8]
    sequence    prefill│dec│ verification

Row r attends to these slots, in the order of positions:
- without `tails` (every draft is a chain): positions 0 … positions[r], found through its sequence's page table;
- with `tails`: positions below `bases[s]` through the page table, then the slots `tails[r, 0 … positions[r]-bases[s]]`,
  its ancestors in the draft tree and itself (so that a node never sees its siblings). A row below its base, such as a
  prefill row beside a tree of another sequence, has no tail at all.
A sliding window w further limits this to the last w of them.

A *tap* is a place where hidden states are kept for drafters that read them. In a model of n layers, tap i < n is the
residual stream that enters layer i, tap n is the state after the last norm, and tap n + 1 the stream before that norm.
A Forward gets its taps when it is made. It keeps no hidden states if it has no taps, or if a batch does not ask for
them.

Nothing here depends on requests, drafters or queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.quant import Weight

PAGE_SIZE = 16  # KV slots a page


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass. All tensors are int32, contiguous and on the device of the model."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    row_starts: Tensor  # [seqs + 1]
    bases: Tensor  # [seqs] first position that is found in `tails`; past the last row of a sequence without a tree
    page_table: Tensor  # [seqs, pages] page ids; entries past the end of a sequence are arbitrary
    logit_rows: Tensor  # [outs] rows to compute logits for, ascending
    tails: Tensor | None = None  # [rows, depth] slots of the ancestors of each row, see above
    features: bool = True  # False: keep no hidden states at taps, though the Forward may have some
    states: bool = False  # True: keep the hidden states after the last norm, whatever the taps
    seeds: Tensor | None = None  # int64 [seqs] seeds of the noise that draws the next tokens, see `Output.drawn`
    inverse_temperatures: Tensor | None = None  # float32 [seqs]; 0: no noise, the best token is drawn
    roots: Tensor | None = None  # [seqs] row of the last committed token, which the draft follows; None: no drafts


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a pass, for `Batch.logit_rows`. The next pass of the same Forward reuses its memory."""

    logits: Tensor  # float32 [outs, vocab]
    argmax: Tensor  # int32 [outs]; of equal logits the lowest index
    features: Tensor | None = None  # float32 [rows, taps * hidden], on the model's device; None: none kept
    states: Tensor | None = None  # float32 [rows, hidden] after the last norm, on the model's device; None: none kept
    # [outs] tokens drawn with the batch's seeds and inverse temperatures; None: this Forward draws none. Meaningful
    # only along the path that the target itself drew: entries below a rejected token are arbitrary.
    drawn: Sequence[int] | memoryview | None = None


class KVMemory(Protocol):
    """Keys and values of every layer in `num_pages` pages; the layout is the implementation's own."""

    num_pages: int

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slots `source` onto slots `target` in every layer; all are read before any is written."""

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values as float32 [layers, n, kv_heads, head_dim]; slow, for tests and audits."""


class Backend(Protocol):
    """The arithmetic a decoder asks for beyond plain tensor operations, bound to one KV memory."""

    @property
    def kv(self) -> KVMemory: ...

    def begin(self, batch: Batch) -> None:
        """Prepare for a pass over `batch`, once for all layers; `store` and `attend` belong to it until the next."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values [rows, kv_heads, head_dim] of the batch into its slots."""

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        """Compute attention of queries [rows, heads, head_dim], in the same shape, as Batch says; window 0: none."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Compute x [rows, k] times weight [n, k] transposed, plus bias [n]."""


class Forward(Protocol):
    """A loaded model that can run a pass over a batch, with the KV memory it reads and writes."""

    vocab_size: int
    bitwise: bool  # True: a row's result never depends on which other rows ride along
    taps: Sequence[int]  # ascending; the module's docstring defines a tap

    @property
    def kv(self) -> KVMemory: ...

    def __call__(self, batch: Batch) -> Output: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up embeddings [n, hidden] of tokens int32 [n], unscaled, for heads without an embedding of their own."""

    def project(self, states: Tensor) -> Tensor:
        """Compute float32 logits [n, vocab] from states [n, hidden], as those after the last norm, for heads without an
        output layer of their own."""

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        """Draw argmax(logits [n, vocab] * inverse_temperatures [n] + gumbel(keys [n, 2])) as int64 [n].

        See `kernels.noise`."""
