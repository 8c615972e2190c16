"""Copies to a device: a table has the masks that were written last, for the rows that have one."""

from __future__ import annotations

import numpy as np
import torch

from paceline.runner.rounds.upload import MaskTable


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
