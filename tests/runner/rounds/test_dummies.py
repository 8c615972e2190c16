"""Chunks that are read at the start have the shapes of traffic."""

from __future__ import annotations

import pytest

from paceline.runner.rounds import dummies


@pytest.mark.parametrize(("lanes", "most"), [(1, 16), (6, 64), (64, 8192), (256, 2048)])
def test_prompts_have_every_size_of_a_step(lanes: int, most: int) -> None:
    reads = [*dummies.prompts(9, lanes=lanes, most=most, drafts=True)]
    assert all(sum(chunk.count for chunk in chunks) <= most for chunks in reads)
    assert all(chunk.lane == 9 and chunk.draws and chunk.drafts and chunk.target for each in reads for chunk in each)
    shapes = {(len(chunks), chunks[0].count) for chunks in reads}
    assert len(shapes) == len(reads), "no shape is read twice"
    for rows in (16, 32, 64, 2048, 8192):
        assert ((1, rows) in shapes) == (rows <= most)
    for count in (2, 4, 64, 128):
        for rows in (dummies.SHORT, dummies.LONG):
            assert ((count, rows) in shapes) == (count <= lanes and count * rows <= most)
    assert (lanes, dummies.SHORT) in shapes or lanes * dummies.SHORT > most


def test_heads_read_held_states_of_any_number_of_sequences() -> None:
    reads = [*dummies.held(9, lanes=20)]
    assert [len(chunks) for chunks in reads] == [1, 2, 4, 8, 16, 20]
    assert all(chunk.drafts and not chunk.target for chunks in reads for chunk in chunks)
