"""Reading a record: whole, old, cut off, edited or empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.replay.traffic import read_traffic
from paceline.server.record import page_names
from tests.replay.recorded import ended, taken, write

PROMPT = tuple(range(40))


def test_requests_come_with_their_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        taken("a", 5.0, PROMPT, sampling={"temperature": 0.5, "n": 2}),
        taken("b", 6.0, (1, 2)),
        {**ended("a", 9, steps=3, drafter="ngram"), "sample": 1},
        ended("a", 7, steps=7),
    )
    traffic = read_traffic(path)
    first, second = traffic.requests
    assert (first.id, first.at, first.length, first.tokens, first.model) == ("a", 5.0, 40, PROMPT, "tiny")
    assert first.sampling.temperature == 0.5
    assert first.pages == tuple(page_names(PROMPT))
    assert len(first.pages) == 2
    assert [(each.sample, each.length, each.tokens_per_step) for each in first.answers] == [(0, 7, 1.0), (1, 9, 3.0)]
    assert first.answers[1].stats == {"steps": 3, "drafter": "ngram"}
    assert second.answers == ()
    assert not traffic.notes
    assert traffic.has_texts


def test_an_old_record_has_prompts_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"id": "a", "prompt_tokens": list(PROMPT), "sampling": {}})
    traffic = read_traffic(path)
    [request] = traffic.requests
    assert (request.at, request.model, request.answers) == (None, "", ())
    assert request.pages == tuple(page_names(PROMPT))
    assert traffic.notes == ("1 of 1 requests have no arrival time",)


def test_a_record_without_texts(tmp_path: Path) -> None:
    line = {"id": "a", "at": 1.0, "model": "tiny", "prompt_length": 33, "pages": ["aa", "bb"], "sampling": {}}
    traffic = read_traffic(write(tmp_path / "r.jsonl", line, ended("a", 2)))
    assert not traffic.has_texts
    assert (traffic.requests[0].length, traffic.requests[0].pages) == (33, ("aa", "bb"))


def test_what_is_odd_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path / "r.jsonl",
        taken("late", 9.0, (1,), colour="red", share=0.5),
        taken("early", 2.0, (1,)),
        ended("gone", 3),
        tail='{"id": "torn", "at": 3',
    )
    traffic = read_traffic(path)
    assert [request.id for request in traffic.requests] == ["early", "late"]
    notes = "\n".join(traffic.notes)
    assert "1 lines have a field 'colour', which is not known" in notes
    assert "1 answers end whose request is not in the file" in notes
    assert "sorted" in notes
    assert "has 50% of the requests" in notes
    assert traffic.share == 0.5
    assert "r.jsonl:4: a recorded request without its end is left out" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "prompt": "hello"}, "neither prompt_tokens nor prompt_length"),
        (taken("a", 1.0, ()), "must be a list of token ids"),
        (taken("a", 1.0, ["x"]), "must be a list of token ids"),  # type: ignore[list-item]
        (taken("a", True, (1,)), "at must be a time in seconds, not True"),
        (taken("a", float("nan"), (1,)), "at must be a time"),
        (taken("a", 1.0, (1,), share=0), "share must be above 0"),
        (taken("a", 1.0, (1,), pages=["x"]), "pages must be at most 0 names"),
        (taken("a", 1.0, (1,), sampling={"warmth": 1}), "sampling parameters that no request has"),
        (taken("a", 1.0, (1,), sampling=[1]), "sampling parameters that no request has"),
        ({"id": "a", "prompt_length": 0}, "prompt_length must be a whole number from 1 on, not 0"),
        ({"id": "a", "prompt_length": 10**12}, "prompt_length must be"),
        (ended("a", -1), "output_tokens must be a whole number from 0 on, not -1"),
        (ended("a", 2.5), "output_tokens must be"),  # type: ignore[arg-type]
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "r.jsonl", taken("fine", 0.0, (1,)), line)
    with pytest.raises(InvalidRequest, match=message) as raised:
        read_traffic(path)
    assert "r.jsonl:2" in str(raised.value)


def test_files_that_are_no_record(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no record at"):
        read_traffic(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="holds no requests"):
        read_traffic(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidRequest, match="holds no requests"):
        read_traffic(write(tmp_path / "ends.jsonl", ended("a", 1)))
    with pytest.raises(InvalidRequest, match="was already taken at"):
        read_traffic(write(tmp_path / "twice.jsonl", taken("a", 0.0, (1,)), taken("a", 1.0, (1,))))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_traffic(tmp_path / "bytes.jsonl")
