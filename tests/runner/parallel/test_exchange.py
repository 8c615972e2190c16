"""Sums over ranks: one order, the same bits on every rank and at every degree."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import RankLost
from paceline.runner.parallel.exchange import Exchange, fold
from tests.runner.parallel.split_models import Sent, Threads

LEAVES = 8


def leaves(rows: int = 3) -> list[torch.Tensor]:
    """Parts of very different size, so that the order of a sum shows in its bits."""
    random = torch.Generator().manual_seed(rows)
    return [torch.randn((rows, 64), generator=random) * 10.0 ** (number % 5) for number in range(LEAVES)]


def summed(size: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    each = len(parts) // size
    return Threads.of(size).each(lambda rank, exchange: exchange.sum(parts[rank * each : (rank + 1) * each]))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_same_bits_on_every_rank_and_at_every_degree(size: int, rows: int) -> None:
    parts = leaves(rows)
    assert not torch.equal(fold(parts), torch.stack(parts).sum(0)), "the order does not show"
    for total in summed(size, parts):
        assert torch.equal(total, fold(parts))


@pytest.mark.parametrize("size", [3, 5, 6])
def test_other_numbers_of_ranks(size: int) -> None:
    parts = leaves()[:size]
    for total in summed(size, parts):
        assert torch.equal(total, fold(parts))


def test_a_butterfly_sends_once_a_level() -> None:
    threads = Threads.of(8)
    threads.each(lambda rank, exchange: exchange.sum([leaves()[rank]]))
    assert [group.sent for group in threads.groups] == [3] * 8


def test_parts_are_summed_in_float32() -> None:
    parts = [torch.tensor([[256.0]], dtype=torch.bfloat16), torch.tensor([[1.0]], dtype=torch.bfloat16)]
    assert [total.item() for total in summed(2, parts)] == [257.0, 257.0]


def test_fold_adds_neighbours_first() -> None:
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert fold([big, one, one, one]).item() == 2**24 + 2  # (big + 1) + (1 + 1)
    assert fold([big, one, one]).item() == 2**24  # (big + 1) + 1
    assert fold([one]) is one


def test_only_rank_0_gathers() -> None:
    shapes = [(2, 3), (2, 1), (2, 4)]
    parts = [torch.full(shape, float(rank)) for rank, shape in enumerate(shapes)]
    gathered = Threads.of(3).each(lambda rank, exchange: exchange.gather(parts[rank].T.contiguous().T, shapes))
    assert [len(each) for each in gathered] == [3, 0, 0]
    assert all(torch.equal(one, other) for one, other in zip(gathered[0], parts, strict=True))


class Broken:
    """A group whose other ranks have gone, or are silent."""

    def __init__(self, words: str) -> None:
        self.words = words

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Sent:
        return Sent(self._fail)

    recv = send

    def _fail(self) -> None:
        raise RuntimeError(self.words)


class Closed(Broken):
    """A group whose connections are closed: a message fails when it begins."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Sent:
        raise RuntimeError(self.words)

    recv = send


@pytest.mark.parametrize("group", [Broken, Closed])
@pytest.mark.parametrize(
    ("words", "said"),
    [("Timed out waiting 8000ms for send", "rank 1 has not answered in time"), ("Connection reset", "rank 1 has gone")],
)
def test_a_rank_that_is_lost(words: str, said: str, group: type[Broken]) -> None:
    with pytest.raises(RankLost, match=said):
        Exchange(group(words), rank=0, size=2).sum(leaves()[:1])
    with pytest.raises(RankLost, match=said):
        Exchange(group(words), rank=0, size=2).gather(leaves()[0], [(1,), (1,)])
    with pytest.raises(RankLost, match="rank 0"):
        Exchange(group(words), rank=1, size=2).gather(leaves()[0], [(1,), (1,)])
