"""An idle engine that needs other processes notices their loss."""

from __future__ import annotations

import threading

import pytest

from paceline.engine import thread as module
from paceline.engine.thread import EngineThread
from paceline.errors import EngineDead, RankLost
from paceline.types import Request, SamplingParams, TokenEvent
from tests.rig import build
from tests.runs import prompt

PATIENCE = 100.0  # seconds: a guard against hanging
REQUEST = Request(id="a", prompt=prompt(9, seed=1), sampling=SamplingParams(max_tokens=4))


def test_an_idle_engine_dies_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    engine, looks, heard = build("toy").engine, iter(range(100)), threading.Event()
    reasons: list[str | None] = []

    def watch() -> None:
        if next(looks) == 3:
            raise RankLost("rank 1 was killed")

    def deliver(events: list[TokenEvent], dead: str | None) -> None:
        assert not events
        reasons.append(dead)
        heard.set()

    engine.watch = watch
    thread = EngineThread(engine, deliver=deliver)
    thread.start()
    assert heard.wait(PATIENCE)
    thread.stop()
    thread.join(PATIENCE)
    assert reasons == ["RankLost: rank 1 was killed"], "it is told once"
    assert next(looks) == 4, "a dead engine is not watched"
    assert isinstance(engine.failure, RankLost)
    with pytest.raises(EngineDead, match="rank 1 was killed"):
        engine.submit(REQUEST)


def test_a_rank_that_is_lost_in_an_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build("toy").engine

    def improve() -> bool:
        raise RankLost("rank 1 was killed")

    monkeypatch.setattr(engine._stepper, "improve", improve)
    assert not engine.improve()
    assert engine.dead == "RankLost: rank 1 was killed"
