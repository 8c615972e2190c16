"""Arrivals: when each answer of a record is due, how long it is, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from tests.replay.recorded import ended, scheduled, taken, write


def a_record(tmp_path: Path) -> Path:
    return write(
        tmp_path / "r.jsonl",
        taken("a", 100.0, (1, 2), sampling={"n": 2}),
        taken("b", 104.0, (1, 2, 3)),
        ended("a", 5),
        {**ended("a", 6), "sample": 1},
        ended("b", 7),
    )


def test_every_answer_arrives_when_its_request_did(tmp_path: Path) -> None:
    found = scheduled(a_record(tmp_path))
    assert [(each.id, each.due, each.answer.length, each.number) for each in found.arrivals] == [
        ("a/0", 0.0, 5, 1),
        ("a/1", 0.0, 6, 2),
        ("b/0", 4.0, 7, 3),
    ]
    assert found.seconds == 4.0
    assert not found.changed
    assert not found.notes


def test_time_may_run_faster_or_be_drawn(tmp_path: Path) -> None:
    path = a_record(tmp_path)
    fast = scheduled(path, speed=2.0)
    assert fast.seconds == 2.0
    assert fast.changed
    drawn = scheduled(path, rate=10.0)
    assert drawn.changed
    assert 0 < drawn.seconds < 4
    assert drawn.arrivals == scheduled(path, rate=10.0).arrivals
    assert scheduled(path, rate=10.0, seed=1).seconds != drawn.seconds
    assert scheduled(path, rate=10.0, speed=2.0).seconds == pytest.approx(drawn.seconds / 2)


def test_what_an_old_record_lacks_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"id": "a", "prompt_tokens": [1], "sampling": {"n": 2}})
    with pytest.raises(InvalidRequest, match="give --rate R"):
        scheduled(path)
    with pytest.raises(InvalidRequest, match=r"nothing can be replayed.*--output-tokens N would give them one"):
        scheduled(path, rate=1.0)
    found = scheduled(path, rate=1.0, output_tokens=3)
    assert [(each.id, each.answer.length) for each in found.arrivals] == [("a/0", 3), ("a/1", 3)]
    assert "1 requests have no recorded end: 3 tokens are taken" in "\n".join(found.notes)


def test_what_cannot_be_replayed_is_left_out_and_said(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        taken("fits", 0.0, [1] * 10),
        taken("long", 1.0, [1] * 18),
        taken("silent", 2.0, [1]),
        taken("open", 3.0, [1]),
        ended("fits", 10),
        ended("long", 3),
        ended("silent", 0),
    )
    found = scheduled(path, max_context=20)
    assert [each.request.id for each in found.arrivals] == ["fits"]
    assert found.changed
    notes = "\n".join(found.notes)
    assert "1 requests have no recorded end and are left out" in notes
    assert "1 answers had no token" in notes
    assert "1 answers need more than the 20 tokens of the context, up to 21, and are left out" in notes
    with pytest.raises(InvalidRequest, match=r"nothing can be replayed"):
        scheduled(path, max_context=5)
