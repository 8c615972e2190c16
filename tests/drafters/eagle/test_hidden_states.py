"""Memory of hidden states: what is written is read, pages keep their places, and some give way to others."""

from __future__ import annotations

import torch

from paceline.drafters.eagle.hidden_states import HiddenStateStore
from paceline.kernels.base import PAGE_SIZE
from paceline.kv.pages import PagePool

WIDTH = 3


def memory(places: int, *, pages: int = 8) -> tuple[PagePool, HiddenStateStore]:
    pool = PagePool(pages)
    return pool, HiddenStateStore(pool, rows=places * PAGE_SIZE, width=WIDTH, device="cpu")


def placed(held: HiddenStateStore, pages: list[int]) -> list[int | None]:
    return [held.place(page) for page in pages]


def test_what_is_written_is_read() -> None:
    pool, held = memory(2)
    [page] = pool.take(1)
    first = held.place(page)
    assert first is not None
    features = torch.arange(4.0 * WIDTH).view(4, WIDTH)
    held.write(features, [3, 1], [first + 5, first + 6])
    held.write(features, range(4), range(first + 7, first + 11))
    assert torch.equal(held.read([first + 6, first + 5]), features[[1, 3]])
    assert torch.equal(held.read(held.rows_of([page], 7, 11)), features)


def test_the_same_tensor_is_read_anew_each_time() -> None:
    """A pass of the same shape gives the same tensor with other values."""
    _, held = memory(2)
    features = torch.zeros(2, WIDTH)
    held.write(features, [0, 1], [0, 1])
    features += 5
    held.write(features, [0, 1], [2, 3])
    assert held.read([0, 1, 2, 3])[:, 0].tolist() == [0, 0, 5, 5]


def test_rows_of_several_pages_follow_each_other() -> None:
    pool, held = memory(3)
    pages = pool.take(2)
    second, first = held.place(pages[1]), held.place(pages[0])
    assert first is not None
    assert second is not None
    assert held.rows_of(pages, 14, 18) == [first + 14, first + 15, second, second + 1]


def test_a_page_keeps_its_place_until_it_is_dropped() -> None:
    pool, held = memory(2)
    a, b, c = pool.take(3)
    assert placed(held, [a, b, a]) == [0, PAGE_SIZE, 0]
    assert held.place(c) is None
    held.drop([b])
    assert placed(held, [c, a]) == [PAGE_SIZE, 0]


def test_there_is_never_more_room_than_the_pool_has_pages() -> None:
    _, held = memory(50, pages=4)
    assert len(held.memory) == 4 * PAGE_SIZE


def test_only_whole_pages_are_there_and_only_in_their_epoch() -> None:
    pool, held = memory(2)
    [page] = pool.take(1)
    held.place(page)
    assert page not in held
    held.complete(page)
    assert page in held
    assert held.leading([page, page + 1]) == 1
    pool.give_back([page])
    assert pool.take(1) == [page]
    assert page not in held


def test_pages_that_nobody_holds_give_way_the_oldest_first() -> None:
    pool, held = memory(4)
    pages = pool.take(6)
    placed(held, pages[:4])
    for page in pages[:3]:
        held.complete(page)
        pool.remember(page, bytes([page]))
    pool.give_back(pages[:3])
    held.refresh([pages[0]])
    assert held.place(pages[4]) is not None
    assert [page in held for page in pages[:3]] == [True, False, False]  # one for now, one for the next
    assert held.place(pages[3]) == 3 * PAGE_SIZE


def test_places_of_an_earlier_epoch_give_way_though_their_page_is_held() -> None:
    pool, held = memory(1)
    old, new = pool.take(2)
    held.place(old)
    pool.give_back([old])
    assert pool.take(1) == [old]
    assert held.place(new) == 0


def test_nobody_looks_for_room_twice_before_somebody_lets_go() -> None:
    pool, held = memory(1)
    held_page, other = pool.take(2)
    held.place(held_page)
    assert held.place(other) is None
    pool.give_back([held_page])
    assert held.place(other) is None
    held.expect_room()
    assert held.place(other) == 0


def test_it_is_short_of_room_until_half_is_free() -> None:
    pool, held = memory(4)
    pages = pool.take(5)
    assert not held.is_short
    placed(held, pages)
    assert held.is_short
    held.drop(pages[:1])
    assert held.is_short
    held.drop(pages[1:2])
    assert not held.is_short
