from __future__ import annotations

import numpy as np

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import LENGTH_MULTIPLE, epoch_batches, in_order, pad


def exchange(length: int, prompt: int = 3) -> Exchange:
    return Exchange(np.arange(length, dtype=np.int32) % 50, prompt)


def test_an_epoch_has_every_exchange_once_and_fits() -> None:
    lengths = np.random.default_rng(0).integers(5, 90, size=300)
    exchanges = [exchange(int(length)) for length in lengths]
    batches = epoch_batches(exchanges, tokens=512, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    for batch in batches:
        texts = pad([exchanges[index] for index in batch])
        assert texts.ids.numel() <= 512
        assert texts.ids.shape[1] % LENGTH_MULTIPLE == 0
    assert sum(pad([exchanges[i] for i in batch]).ids.numel() for batch in batches) < 1.5 * lengths.sum()


def test_epochs_differ_and_can_be_made_again() -> None:
    exchanges = [exchange(20 + i) for i in range(40)]
    first, again, other, seeded = (
        epoch_batches(exchanges, tokens=256, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert first != other
    assert first != seeded


def test_a_text_longer_than_a_batch_is_a_batch() -> None:
    assert epoch_batches([exchange(100)], tokens=64, seed=0, epoch=0) == [[0]]


def test_in_order_keeps_all() -> None:
    found = [int(end) for texts in in_order([exchange(n) for n in (9, 30, 17)], tokens=64) for end in texts.ends]
    assert found == [9, 17, 30]
