"""Copies to a device: a table has the masks that were written last, for the rows that have one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.runner.rounds.alignment import BYTES
from paceline.runner.rounds.upload import MAX_PATCH, MaskTable, Patches, Upload, pinned
from paceline.sampling.words import mask_words, pack


def test_rows_have_the_masks_that_were_written_last() -> None:
    table = MaskTable(4, 70, torch.device("cpu"), masks=5)
    assert table.masks.words.shape == (5, mask_words(70))
    for turn in range(9):  # more often than there is memory
        masks = {row: pack([10 * turn % 70, row], 70) for row in (3, turn % 3)}
        sheet = table.sheet()
        sheet.put([*masks], masks.values())
        sheet.settle()
        which, words = table.masks
        assert [row for row in range(4) if which[row] >= 0] == sorted(masks)
        for row in masks:
            assert np.array_equal(words[which[row]].numpy().view(np.uint32), masks[row])
    table.sheet().settle()
    assert table.masks.which.tolist() == [-1] * 4


def test_patches_change_what_they_name() -> None:
    table, expected = torch.zeros(500, dtype=torch.int32), [0] * 500
    patches = Patches(torch.device("cpu"))
    for turn, count in enumerate([1, 3, MAX_PATCH, 2, 1, 5, 4]):  # more often than there is memory
        changes = {(7 * turn + 3 * i) % 500: 100 * turn + i for i in range(count)}
        patches.apply(table, changes)
        for place, value in changes.items():
            expected[place] = value
        assert table.tolist() == expected


def test_arrays_travel_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its type and values, and begins where kernels can load 16 bytes at once."""
    copies, upload = [], Upload.__call__
    monkeypatch.setattr(Upload, "__call__", lambda self, values: copies.append(values) or upload(self, values))
    given = [np.arange(3), np.array([7], dtype=np.int32), np.zeros(0, dtype=np.int32), np.arange(5, dtype=np.int32)]
    got = Upload(torch.device("cpu")).together(*given)
    assert len(copies) == 1
    assert [each.dtype for each in got] == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert all(np.array_equal(each.numpy(), array) for each, array in zip(got, given, strict=True))
    assert all(each.storage_offset() * each.itemsize % BYTES == 0 for each in got)


def test_pinned_memory_is_filled_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would wake its threads for so many elements, and a prompt would wait for all of them."""
    asked, empty = [], torch.empty

    def unpinned(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", unpinned)
    for name in ("pin_memory", "copy_", "clone"):
        monkeypatch.setattr(torch.Tensor, name, None)
    for values in (np.arange(99_999, dtype=np.int32).reshape(3, -1), np.arange(40_000), np.zeros(0, dtype=np.uint8)):
        memory = pinned(values)
        assert np.array_equal(memory.numpy(), values)
        assert memory.numpy().dtype == values.dtype
        assert not np.shares_memory(memory.numpy(), values)
    assert asked == [True] * 3
