r"""What ranks send each other within a pass: partial sums, and parts of a result for rank 0.

Sums have one fixed order, whatever the batch: a binary tree over all shards. A rank adds its own shards by the lower
levels. For the upper levels ranks exchange sums in pairs (a butterfly): addition commutes, so both get the same bits.

    shards   0   1   2   3   4   5   6   7
    rank 0    \ /     \ /     \ /     \ /    rank 1 of 2
                \     /         \     /
                   s    ◀────▶    s          s of rank 0 + s of rank 1, on both

Where the ranks are no power of two, each gets the sums of all and adds them by the same kind of tree.

A process group of torch carries the bytes: gloo between CPUs. NCCL's has the same interface. Compiled programs add by
the same tree in memory that all ranks share (kernels/cpu/exchange.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from paceline.errors import NoAnswer
from paceline.kernels.cpu.segment import Segment

LOOPBACK = "127.0.0.1"  # ranks listen here and nowhere else: they trust each other
TAG = 1  # messages between two ranks arrive in the order in which they were sent


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> bool: ...


class Group(Protocol):
    """The part of torch's ProcessGroup that an exchange needs."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...


class Exchange:
    """The messages of one rank to the others. Every rank makes the same calls in the same order."""

    def __init__(self, group: Group | None, *, rank: int, size: int, segment: Segment | None = None) -> None:
        """`group` and `segment`, in which compiled programs add: None for a rank that is alone."""
        self.rank, self.size, self.segment = rank, size, segment
        self._group = group

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum the parts of all shards in float32; `parts` are those of this rank. All ranks get the same bits."""
        total = fold([part.float() for part in parts])
        if self.size & (self.size - 1):
            return fold(self.swap(total))
        for level in range(self.size.bit_length() - 1):
            [other] = self._swap(total, [self.rank ^ 1 << level])
            total = total + other
        return total

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the parts of all ranks on rank 0, and nothing on the others. `shapes`: of each rank's part."""
        part = part.contiguous()
        if self.rank:
            with _talking_to(0):
                self._given.send([part], 0, TAG).wait()
            return []
        received = [torch.empty(shape, dtype=part.dtype) for shape in shapes[1:]]
        self._wait([(rank, self._begin(self._given.recv, each, rank)) for rank, each in enumerate(received, 1)])
        return [part, *received]

    def swap(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which are alike, on every rank."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        theirs = dict(zip(others, self._swap(mine, others), strict=True))
        return [theirs.get(rank, mine) for rank in range(self.size)]

    def _swap(self, mine: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Send a tensor to each of these ranks, and return theirs."""
        mine, theirs = mine.contiguous(), [torch.empty_like(mine) for _ in ranks]
        works: list[tuple[int, Work]] = []
        for rank, each in zip(ranks, theirs, strict=True):
            for call, tensor in ((self._given.send, mine), (self._given.recv, each)):
                works.append((rank, self._begin(call, tensor, rank)))
        self._wait(works)
        return theirs

    @property
    def _given(self) -> Group:
        assert self._group is not None, "a rank that is alone has nobody to talk to"
        return self._group

    @staticmethod
    def _begin(call: Callable[[list[Tensor], int, int], Work], tensor: Tensor, rank: int) -> Work:
        with _talking_to(rank):
            return call([tensor], rank, TAG)

    @staticmethod
    def _wait(works: Sequence[tuple[int, Work]]) -> None:
        for rank, work in works:
            with _talking_to(rank):
                work.wait()


@contextmanager
def _talking_to(rank: int) -> Iterator[None]:
    """Turn a failure into NoAnswer. A message to a rank that is gone fails when it begins, or when it is waited for."""
    try:
        yield
    except RuntimeError as error:
        silent = "imed out" in str(error)  # beyond the group's timeout; else the connection broke
        said = "has not answered in time" if silent else "has gone"
        raise NoAnswer(f"rank {rank} {said}", silent=silent) from error


def fold(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors in a binary tree: neighbours first; the last of an odd number goes up alone."""
    level = list(parts)
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def join(store: Path, *, rank: int, size: int, timeout: float, memory: int, pipes: Sequence[int]) -> Exchange:
    """Connect to the other ranks, which name the same new file.

    `timeout`: seconds that a message may take. `memory`: descriptor of the memory that all ranks share. `pipes`:
    sockets that ranks close when they end."""
    if size == 1:
        return Exchange(None, rank=0, size=1)
    gloo: Any = distributed.ProcessGroupGloo  # its stubs lack most of it
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    meeting = distributed.FileStore(str(store), size)  # type: ignore[attr-defined]
    meeting.set_timeout(options._timeout)
    try:
        group: Group = gloo(meeting, rank, size, options)
    except RuntimeError as error:
        raise NoAnswer(f"rank {rank} met no other rank within {timeout:g} s: {str(error).splitlines()[0]}") from error
    segment = Segment(memory, rank=rank, size=size, timeout=timeout, pipes=pipes)
    return Exchange(group, rank=rank, size=size, segment=segment)
