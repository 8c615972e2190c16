"""Copies to a device: a table has the masks that were written last, for the rows that have one."""

from __future__ import annotations

import numpy as np
import torch

from paceline.runner.rounds.upload import MAX_PATCH, MaskTable, Patches


def test_rows_have_the_masks_that_were_written_last() -> None:
    table = MaskTable(4, 70, torch.device("cpu"))
    assert table.masks.words.shape == (4, 3)
    for turn in range(9):  # more often than there is memory
        masks = {row: np.full(3, 10 * turn + row, dtype=np.uint32) for row in (3, turn % 3)}
        which, words = table.write(masks)
        assert [row for row in range(4) if which[row] >= 0] == sorted(masks)
        for row in masks:
            assert words[which[row]].tolist() == [10 * turn + row] * 3
    assert table.write({}).which.tolist() == [-1] * 4


def test_patches_change_what_they_name() -> None:
    table, expected = torch.zeros(500, dtype=torch.int32), [0] * 500
    patches = Patches(torch.device("cpu"))
    for turn, count in enumerate([1, 3, MAX_PATCH, 2, 1, 5, 4]):  # more often than there is memory
        changes = {(7 * turn + 3 * i) % 500: 100 * turn + i for i in range(count)}
        patches.apply(table, changes)
        for place, value in changes.items():
            expected[place] = value
        assert table.tolist() == expected
