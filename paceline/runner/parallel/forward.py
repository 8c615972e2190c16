"""The Forward of a model that is split over ranks, on rank 0. It is as bitwise as its parts are: compiled
programs are, and torch is not.

One small message goes to the workers for each pass: the batch. Everything else that a step decides on, drafts, draws
and acceptance, happens on rank 0 alone, so no rank can decide differently.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from paceline.kernels.base import Batch, KVMemory, Output
from paceline.models.weights import Format, Progress
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Lead, Load
from paceline.runner.parallel.part import Part, load_part, use_threads
from paceline.runner.parallel.rank_memory import Need, check_memory
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.parallel.split import Split

T = TypeVar("T")


class SplitKV:
    """Implements KVMemory: the heads of all ranks under the same page ids."""

    def __init__(self, forward: SplitForward, *, num_pages: int) -> None:
        self.num_pages = num_pages
        self._forward = weakref.proxy(forward)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._forward.everywhere("move", list(source), list(target))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._forward.everywhere("read", slots)
        return pair


class SplitForward:
    """Implements Forward."""

    def __init__(
        self,
        ranks: Ranks,
        path: str,
        *,
        split: Split,
        format: Format,
        dtype: torch.dtype,
        num_pages: int,
        threads: int | None = None,
        taps: Sequence[int] = (),
        max_context: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Have all ranks read their shards of the model at `path`. `threads`: of each rank; None: as ranks began."""
        order = Load(
            key=-1,
            path=path,
            format=format,
            split=split,
            num_pages=num_pages,
            dtype=dtype,
            taps=tuple(taps),
            threads=threads or ranks.threads,
            max_context=max_context,
        )

        def load(key: int) -> Load:
            return replace(order, key=key)

        def mine(order: Load, exchange: Exchange, look: Callable[[], None]) -> Part:
            def report(done: int, total: int) -> None:
                look()
                if progress is not None:
                    progress(done, total)

            return load_part(order, exchange, progress=report)

        self.ranks = ranks
        self._key, self._part = ranks.load(load, mine)
        self.vocab_size = self._part.config.vocab_size
        self.taps = taps
        self.bitwise = split.packed
        self._torch_threads = order.torch_threads
        self.kv: KVMemory = SplitKV(self, num_pages=num_pages)
        self.close = weakref.finalize(self, ranks.free, self._key)

    def leading(self, layers: int) -> SplitForward:
        """Return the first layers with the last norm and the output layer, on the same weights and KV memory."""
        whole, own = self._key, self._part
        part = copy(self)
        part.taps = ()
        part._key, part._part = self.ranks.load(
            lambda key: Lead(key, whole, layers), lambda order, exchange, look: own.leading(order.layers)
        )
        part.close = weakref.finalize(part, self.ranks.free, part._key)
        return part

    def __call__(self, batch: Batch) -> Output:
        output: Output = self.everywhere("compute", batch)
        return output

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.everywhere("embed", tokens)
        return embedded

    def project(self, states: Tensor) -> Tensor:
        logits: Tensor = self.everywhere("project", states.float())
        return logits

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return self._part.pick(logits, inverse_temperatures, keys)

    def everywhere(self, method: str, *arguments: object) -> T:  # type: ignore[type-var]
        """Run a method of Part on every rank, and return what rank 0 gets. On a new thread torch forgets its
        number of threads, which decides on bits."""
        use_threads(self._torch_threads)
        result: T = self.ranks.call(self._key, method, arguments, getattr(self._part, method))
        return result


def split_forward(
    path: str,
    *,
    split: Split,
    format: Format,
    dtype: torch.dtype,
    needs: Sequence[Need],
    num_pages: int,
    threads: int,
    timeout: float,
    taps: Sequence[int] = (),
    max_context: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> SplitForward:
    """Load a model on ranks, which are started unless another model has `ranks` already. `needs`: of each
    rank, for which ranks that are started must have room."""
    new = ranks is None
    if ranks is None:
        use_threads(1 if split.packed else threads)
        ranks = Ranks(split.degree, threads=threads, timeout=timeout)
    try:
        if new:
            check_memory(ranks.memory, needs)
        return SplitForward(
            ranks,
            path,
            split=split,
            format=format,
            dtype=dtype,
            num_pages=num_pages,
            threads=threads,
            taps=taps,
            max_context=max_context,
            progress=progress,
        )
    except BaseException:
        ranks.close()
        raise
