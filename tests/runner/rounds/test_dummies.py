"""Chunks that are read at the start have the shapes of traffic."""

from __future__ import annotations

import itertools

import pytest

from paceline.runner.rounds import dummies


@pytest.mark.parametrize(
    ("lanes", "longest", "most"), [(1, 16, 16), (6, 9000, 64), (64, 9000, 8192), (256, 9000, 2048), (16, 300, 3200)]
)
def test_prompts_have_every_size_of_a_step(lanes: int, longest: int, most: int) -> None:
    """A sequence's length bounds each prompt, and a step's rows bound them all. The longest of several has any size up
    to LONG: a drafter that catches up reads few rows of many sequences."""
    counts = dummies.counts([size for size in (1, 2, 3, 48, 64, lanes) if size <= lanes], kv_heads=[8, 3])
    assert {16, 44} <= {*counts} or lanes < 44, "each KV head has a multiprocessor of its own"
    reads = [*dummies.prompts(9, counts=counts, longest=longest, most=most, drafts=True)]
    assert all(sum(chunk.count for chunk in chunks) <= most for chunks in reads)
    assert all(0 < chunk.count <= longest for chunks in reads for chunk in chunks)
    assert all(chunk.lane == 9 and chunk.draws and chunk.drafts and chunk.target for each in reads for chunk in each)
    alone = [chunks[0].count for chunks in reads if len(chunks) == 1]
    assert alone[0] == 1
    assert alone[-1] == min(longest, most)
    assert all(more == min(2 * fewer, alone[-1]) for fewer, more in itertools.pairwise(alone))
    for rows in {1, 4, min(dummies.SHORT, longest, most), min(dummies.LONG, longest, most)}:
        read = {len(chunks) for chunks in reads if len(chunks) > 1 and chunks[0].count == rows}
        assert read == {count for count in counts if 1 < count <= 1 + most - rows}


def test_heads_read_held_states_of_any_number_of_sequences() -> None:
    reads = [*dummies.held(9, lanes=20)]
    assert [len(chunks) for chunks in reads] == [1, 2, 4, 8, 16, 20]
    assert all(chunk.drafts and not chunk.target for chunks in reads for chunk in chunks)
