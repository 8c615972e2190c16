"""Copies to a device: tables get what has changed, and keep the rest."""

from __future__ import annotations

import torch

from paceline.runner.rounds.upload import TableUpload


def test_rows_that_have_changed_arrive_once() -> None:
    table = torch.zeros((5, 3), dtype=torch.int32)
    upload = TableUpload(5, 3, torch.device("cpu"))
    upload.row(1)[:] = 7
    upload.row(3)[:] = (1, 2, -3)
    upload.apply(table)
    assert table.tolist() == [[0] * 3, [7] * 3, [0] * 3, [1, 2, -3], [0] * 3]
    table.zero_()
    upload.apply(table)
    assert not table.any()
    upload.row(2)[0] = 4
    upload.apply(table)
    assert table.tolist() == [[0] * 3, [0] * 3, [4, 0, 0], [0] * 3, [0] * 3]


def test_rows_in_between_are_as_they_were_written_last() -> None:
    table = torch.zeros((4, 1), dtype=torch.int32)
    upload = TableUpload(4, 1, torch.device("cpu"))
    for turn in range(9):  # more often than there is memory
        for lane in (0, turn % 3, 3):
            upload.row(lane)[:] = 10 * turn + lane
        upload.apply(table)
        assert table[[0, turn % 3, 3], 0].tolist() == [10 * turn, 10 * turn + turn % 3, 10 * turn + 3]
