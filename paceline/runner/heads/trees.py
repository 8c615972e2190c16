"""Trees that a compiled program drafts: a whole draft is one C call (kernels/cpu/tree.c), whatever its size."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char, c_float, c_int32
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.base import Batch, Output
from paceline.kernels.cpu.abi import BEAM, Order, Pass
from paceline.kernels.cpu.program import Program
from paceline.runner.forwards.compiled import point
from paceline.runner.forwards.known_batches import KnownBatches
from paceline.runner.heads.protocol import Tree, TreeRequest

WANTED = {  # field of the C structure `order`, in the order of memory: field of TreeRequest
    "limits": "limit",
    "top_k": "top_k",
    "min_confidence": "min_confidence",
    "level_prices": "level_price",
    "min_p": "min_p",
    "top_p": "top_p",
}


class Growth(NamedTuple):
    """How the trees of a kind of program grow."""

    beam: int  # nodes that a pass reads for a sequence, at most
    ahead: int  # positions from a row to the token that it reads
    lookahead: int  # levels that are weighed together when the next one is chosen
    odds_slope: float  # the log odds that the best token is accepted without noise are slope · its own + offset
    odds_offset: float
    child_acceptance: float  # usual probability that the best child of a likely node is accepted


# docs/experiments.md, "Chances of greedy drafts, once more" and "Trees of a head".
OF_HEAD = Growth(BEAM, ahead=1, lookahead=1, odds_slope=0.8, odds_offset=0.2, child_acceptance=0.7)
# A pass over all layers of a model costs much, so it reads the best node alone: then its keys and values also lie where
# the next draft finds them, if it is accepted. The numbers: docs/experiments.md, "Draft lengths of a draft model".
OF_MODEL = Growth(1, ahead=0, lookahead=3, odds_slope=1.1, odds_offset=0.37, child_acceptance=0.9)


class TreeProgram:
    """Implements TreeDrafter for a compiled program."""

    def __init__(self, program: Program, ids: Tensor, growth: Growth) -> None:
        """`ids` int32: the target's token for each output of the program."""
        self._program, self._ids, self._growth = program, ids, growth
        self._logits = torch.empty((0, len(ids)))
        self._known = KnownBatches[DraftMemory]()

    def draft(self, batch: Batch, features: Tensor | None, wanted: Sequence[TreeRequest], *, width: int) -> list[Tree]:
        longest = max(each.limit for each in wanted)
        memory = self._known.get(batch)
        if memory is None or not memory.fits(longest, width):
            output = self._output(self._growth.beam * len(batch.bases))
            made = DraftMemory(batch, output, longest, width, ids=self._ids, growth=self._growth)
            memory = self._known.put(batch, made)
        memory.read_from(features)
        memory.write(wanted)
        self._program.run_draft(memory.pass_, memory.order)
        return memory.read()

    def _output(self, outs: int) -> Output:
        """Return memory for `outs` rows with logits, which all drafts share."""
        if outs > len(self._logits):
            self._logits = torch.empty((outs, len(self._ids)))
            self._known.clear()  # prepared structures point to the old memory
        return Output(logits=self._logits[:outs], argmax=torch.empty(outs, dtype=torch.int32))


class DraftMemory:
    """Memory of the drafts of one batch: the request of each sequence, and the trees that were drafted."""

    def __init__(self, batch: Batch, output: Output, longest: int, width: int, *, ids: Tensor, growth: Growth) -> None:
        count = len(batch.bases)
        self._batch, self._count, self._longest, self._width = batch, count, longest, width
        self._features: Tensor | None = None
        self._output = output  # keeps the memory of the results alive
        self.pass_ = Pass()
        point(self.pass_, batch, output)
        # The fields of WANTED, each [count]: two of integers, four of floats; then row prices [count, longest].
        self._layout = Struct(f"={2 * count}i{(4 + longest) * count}f")
        self._asked = bytearray(self._layout.size)
        # counts [count] │ passes [count] │ tokens [count, longest] │ parents [count, longest]; and confidence beside it
        memory = (c_int32 * (count * (2 + 2 * longest)))()
        self._found = memoryview(memory).cast("B").cast("i")
        self._confidence = (c_float * (count * longest))()
        asked, found = addressof(c_char.from_buffer(self._asked)), addressof(memory)
        assert batch.seeds is not None, "drafts are drawn by the batch's seeds"
        assert batch.inverse_temperatures is not None, "drafts are drawn at the batch's temperatures"
        self.order = Order(
            ids=ids.data_ptr(),
            seeds=batch.seeds.data_ptr(),
            inverse_temperature=batch.inverse_temperatures.data_ptr(),
            **{name: asked + 4 * count * i for i, name in enumerate(WANTED)},
            row_prices=asked + 4 * count * len(WANTED),
            counts=found,
            passes=found + 4 * count,
            tokens=found + 4 * count * 2,
            parents=found + 4 * count * (2 + longest),
            confidence=addressof(self._confidence),
            longest=longest,
            vocab=len(ids),
            width=width,
            beam=growth.beam,
            ahead=growth.ahead,
            lookahead=growth.lookahead,
            odds_slope=growth.odds_slope,
            odds_offset=growth.odds_offset,
            child_acceptance=growth.child_acceptance,
        )

    def fits(self, longest: int, width: int) -> bool:
        """Return True if drafts of `longest` nodes and this width fit."""
        return longest <= self._longest and width == self._width

    def read_from(self, features: Tensor | None) -> None:
        """Let the first pass read `features`, if it does. Usually it is the same tensor as last time, and looking up
        its address, which costs microseconds, is skipped."""
        if features is not self._features:
            self._features = features
            self.pass_.features = None if features is None else address_of(features, self._batch)

    def write(self, wanted: Sequence[TreeRequest]) -> None:
        """Write the requests of all sequences, field by field in the order of WANTED, then their row prices."""
        if len(wanted) == 1:  # the usual case, without any loop
            [one] = wanted
            floors = one.min_confidence, one.level_price
            values: Sequence[float] = one.limit, one.top_k, *floors, one.min_p, one.top_p
        else:
            values = [getattr(each, name) for name in WANTED.values() for each in wanted]
        prices = [price for each in wanted for price in self._row_prices(each.row_prices)]
        self._layout.pack_into(self._asked, 0, *values, *prices)

    def _row_prices(self, given: tuple[float, ...]) -> Sequence[float]:
        """Return the prices of as many rows as a draft may have; rows behind the last given one cost as much as it."""
        missing = self._longest - len(given)
        return given[: self._longest] if missing <= 0 else [*given, *[given[-1] if given else 0.0] * missing]

    def read(self) -> list[Tree]:
        """Return the tree of each sequence."""
        found, count, longest = self._found.tolist(), self._count, self._longest
        tokens, parents = found[2 * count :], found[count * (2 + longest) :]
        return [
            Tree(
                tokens[start : start + size],
                parents[start : start + size],
                passes,
                self._confidence[start : start + size],
            )
            for start, size, passes in zip(
                range(0, count * longest, longest), found[:count], found[count : 2 * count], strict=True
            )
        ]


def address_of(features: Tensor, batch: Batch) -> int:
    """Return the address of the hidden states of a batch's rows."""
    assert features.is_contiguous(), "features of adjacent rows lie side by side"
    assert len(features) == len(batch.tokens), f"features of {len(features)} rows for {len(batch.tokens)}"
    return features.data_ptr()
