"""Hidden states of steps on the host in which nobody drafts: kept, and handed over together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from paceline.drafters.base import Seen
from paceline.engine import backlog
from paceline.types import Off
from tests.engine.test_hidden_states_beside_a_device import COUNT, Reader, asked, engine
from tests.laws import under_law
from tests.runs import run, tokens_of

CROWDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "few pages": {"num_pages": 14},
    "few rows": {"max_step_tokens": 7},
    "few lanes": {"max_sequences": 3},
    "no cache": {"prefix_cache": False},
}


# Every crowd with every number of rows, and inline and on a thread with each of both.
CASES = [
    pytest.param(crowd, inline, rows, id=f"{crowd}-{'inline' if inline else 'thread'}-{rows}")
    for i, crowd in enumerate(CROWDS)
    for j, rows in enumerate([5, 20, backlog.MAX_ROWS])
    for inline in [(i + j) % 2 == 0]
]


@pytest.mark.unwatched
@pytest.mark.parametrize(("crowd", "inline", "rows"), CASES)
def test_states_are_complete_when_the_load_falls(
    crowd: str, inline: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_ROWS", rows)
    reader = Reader("sampled")
    reader.inline = inline
    rig = engine(reader, on_device=None, max_draft_batch=2, **CROWDS[crowd])
    told = run(rig, asked("sampled", "reader"), every=2)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", "sampled", COUNT))
    assert rig.engine.drafters["reader"].out is None
    assert len(reader.right) > 2
    assert all(reader.right)
    assert rig.engine.stats.preemptions > 0 or crowd != "few pages"


def test_drafters_are_told_of_many_steps_at_once() -> None:
    reader = Reader("sampled")
    rig = engine(reader, on_device=None, max_draft_batch=1)
    run(rig, asked("sampled", "reader")[:4])
    steps = rig.engine.stats.steps
    assert 0 < reader.counts[True] < steps / 2
    assert sum(map(len, reader.fed.values())) > 4 * reader.counts[True]


def test_sequences_without_a_reader_leave_rows_out() -> None:
    reader = Reader("sampled")
    rig = engine(reader, on_device=None, max_draft_batch=2)
    some = [request for i, request in enumerate(asked("sampled", "reader")) if i % 2]
    others = [request for i, request in enumerate(under_law.device_requests("sampled", count=COUNT)) if i % 2 == 0]
    told = run(rig, [request for pair in zip(others, some, strict=False) for request in pair])
    expected = tokens_of(under_law.plain_device_answers("toy", "sampled", COUNT))
    assert tokens_of(told) == {key: expected[key] for key in told}
    assert reader.right
    assert all(reader.right)


def test_states_of_a_preempted_sequence_are_dropped() -> None:
    """Its pages may be another's by then."""
    strangers: list[int] = []

    class Watching(Reader):
        def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
            running = {sequence.key for sequence in rig.engine._scheduler.running}
            strangers.extend(each.key for each in seen if each.key not in running)
            return super().feed(features, seen, crowded=crowded)

    rig = engine(Watching("sampled"), on_device=None, max_draft_batch=1, num_pages=14)
    run(rig, asked("sampled", "reader"), every=2)
    assert rig.engine.stats.preemptions > 0
    assert not strangers
