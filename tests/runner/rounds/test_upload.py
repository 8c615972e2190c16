"""Copies to a device: tables get what has changed, and keep the rest."""

from __future__ import annotations

import torch

from paceline.runner.rounds.upload import MAX_PATCH, Patches, TableUpload


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


def test_patches_change_what_they_name() -> None:
    table, expected = torch.zeros(500, dtype=torch.int32), [0] * 500
    patches = Patches(torch.device("cpu"))
    for turn, count in enumerate([1, 3, MAX_PATCH, 2, 1, 5, 4]):  # more often than there is memory
        changes = {(7 * turn + 3 * i) % 500: 100 * turn + i for i in range(count)}
        patches.apply(table, changes)
        for place, value in changes.items():
            expected[place] = value
        assert table.tolist() == expected
