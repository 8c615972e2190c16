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


class Idle:
    """An idle engine on its thread, and what it delivers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "IDLE_CHECK_SECONDS", 0.001)
        monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
        self.engine = build("toy").engine
        self.reasons: list[str | None] = []
        self._heard = threading.Event()

    def until_it_dies(self) -> None:
        thread = EngineThread(self.engine, deliver=self._deliver)
        thread.start()
        assert self._heard.wait(PATIENCE)
        thread.stop()
        thread.join(PATIENCE)
        assert self.reasons == ["RankLost: rank 1 was killed"], "it is told once"
        assert isinstance(self.engine.failure, RankLost)
        with pytest.raises(EngineDead, match="rank 1 was killed"):
            self.engine.submit(REQUEST)

    def _deliver(self, events: list[TokenEvent], dead: str | None) -> None:
        assert not events
        self.reasons.append(dead)
        self._heard.set()


def test_an_idle_engine_dies_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, looks = Idle(monkeypatch), iter(range(100))

    def watch() -> None:
        if next(looks) == 3:
            raise RankLost("rank 1 was killed")

    idle.engine.watch = watch
    idle.until_it_dies()
    assert next(looks) == 4, "a dead engine is not watched"


def test_it_is_watched_before_its_cache_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, looks = Idle(monkeypatch), iter(range(100))
    monkeypatch.setattr(module, "IDLE_CHECK_SECONDS", PATIENCE)

    def watch() -> None:
        if next(looks) == 3:
            raise RankLost("rank 1 was killed")

    idle.engine.watch = watch
    idle.until_it_dies()


def test_a_rank_that_is_lost_in_an_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(monkeypatch)

    def improve() -> bool:
        raise RankLost("rank 1 was killed")

    monkeypatch.setattr(idle.engine._stepper, "improve", improve)
    idle.until_it_dies()
