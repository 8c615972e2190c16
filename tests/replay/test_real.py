"""Replays against a server: what is sent, when, and what becomes of a server that goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.client import Client
from paceline.bench.serve import Arm, LoadRun
from paceline.errors import InvalidRequest
from paceline.replay.arrivals import Schedule
from paceline.replay.real import real_run, replay_real
from paceline.replay.report import real_record, record, text
from tests.bench.fake_server import FakeServer, good, serving
from tests.replay.recorded import ended, scheduled, taken, write


def a_schedule(tmp_path: Path, **options: Any) -> Schedule:
    path = write(
        tmp_path / "r.jsonl",
        taken(
            "a", 10.0, (1, 2), sampling={"temperature": 0.5, "top_k": 7, "seed": 5, "stop": ["x"], "max_tokens": 900}
        ),
        taken("b", 10.2, (3, 4, 5)),
        ended("a", 8),
        ended("b", 8),
    )
    return scheduled(path, **options)


def replay(url: str, schedule: Schedule) -> LoadRun:
    runs: list[LoadRun] = []

    async def scenario() -> None:
        client = Client(url, endpoint="completions")
        arm = Arm("real", client, "m")
        runs.append(real_run(arm))
        await replay_real(arm, schedule.arrivals, runs[0], tick=lambda outcome: None)
        await client.close()

    asyncio.run(scenario())
    return runs[0]


def test_requests_are_sent_as_they_were_recorded(tmp_path: Path) -> None:
    with serving(FakeServer(good(), metrics=lambda: "vllm:spec_decode_num_drafts_total 1")) as server:
        run = replay(server.url, a_schedule(tmp_path))
    first, second = server.asked
    assert first["prompt"] == [1, 2]
    assert second["prompt"] == [3, 4, 5]
    assert (first["temperature"], first["top_k"], first["seed"]) == (0.5, 7, 5)
    assert first["max_tokens"] == 8
    assert first["ignore_eos"] is True
    assert "stop" not in first
    assert first["cache_salt"] == second["cache_salt"]
    assert first["model"] == "m"
    assert first["stream"] is True
    assert second["temperature"] == 1.0
    assert "top_k" not in second
    sent = sorted(outcome.started for outcome in run.outcomes)
    assert sent[1] - sent[0] >= 0.19
    assert run.complete
    assert run.counters is not None


def test_time_may_run_faster(tmp_path: Path) -> None:
    with serving(FakeServer(good())) as server:
        run = replay(server.url, a_schedule(tmp_path, speed=1000.0))
    assert run.complete
    assert run.counters is None
    found = record([real_record(run, asked=2, interrupted=False)], {"acceptance": None}, notes=["a note"])
    assert found["runs"][0]["completed"] == 2
    assert 0 < found["runs"][0]["busy_seconds"] <= run.seconds
    shown = text(found)
    assert "2 of 2 answers came to their end." in shown
    assert "note: a note" in shown
    assert "real real: busy" in shown


def test_a_record_without_texts_cannot_be_sent(tmp_path: Path) -> None:
    line = {"id": "a", "at": 0.0, "prompt_length": 4, "sampling": {}}
    path = write(tmp_path / "r.jsonl", line, ended("a", 3))
    with pytest.raises(InvalidRequest, match="recorded without its text, which --real sends"):
        replay("http://127.0.0.1:9", scheduled(path))


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    run = replay("http://127.0.0.1:9", a_schedule(tmp_path, speed=1000.0))
    assert not run.complete
    assert all("no connection" in str(outcome.error) for outcome in run.outcomes)
