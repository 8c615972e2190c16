"""A load that rises and falls on two engines side by side, with engines whose steps take known times."""

from __future__ import annotations

import json

import pytest

from paceline.bench import ramp as ramp_module
from paceline.bench.ramp import Pair, Ramp, Window, run_pair
from paceline.bench.ramp_record import record, text
from paceline.bench.workloads import BenchPrompt
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead
from paceline.types import Finish, Request, TokenEvent

PROMPTS = [BenchPrompt(str(i), "chat", max_tokens=4) for i in range(3)]
TOKENS = [(1, 2), (3,), (4, 5, 6)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stub:
    """Gives each request a token a step. A step takes `seconds` for each sequence."""

    def __init__(self, clock: Clock, *, seconds: float, drafts_up_to: int = 0, fails_at: int = -1) -> None:
        self.stats = EngineStats()
        self.requests: list[Request] = []
        self._clock = clock
        self._seconds = seconds
        self._drafts_up_to = drafts_up_to
        self._fails_at = fails_at
        self._left: dict[str, int] = {}

    def submit(self, request: Request) -> None:
        assert request.id not in self._left
        self.requests.append(request)
        self._left[request.id] = request.sampling.max_tokens or 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> list[TokenEvent]:
        self.stats.steps += 1
        self._clock.now += self._seconds * len(self._left)
        self.stats.drafted += len(self._left) <= self._drafts_up_to
        if self.stats.steps == self._fails_at:
            return [TokenEvent(next(iter(self._left)), 0, finish=Finish.ERROR, error="planted")]
        events = []
        for id in [*self._left]:
            self._left[id] -= 1
            finish = None if self._left[id] else Finish.LENGTH
            events.append(TokenEvent(id, 0, tokens=(7,), finish=finish))
            if finish:
                del self._left[id]
        return events


def pair_of(plain: Stub, default: Stub, clock: Clock, ramp: Ramp, *, number: int = 1) -> Pair:
    return run_pair((plain, default), ramp, PROMPTS, TOKENS, temperatures=(0.0, 1.0), number=number, clock=clock)


def test_the_load_rises_by_factors_and_falls() -> None:
    ramp = Ramp(most=64, seconds=100)
    assert [ramp.wanted(t) for t in (0, 14, 27.5, 40, 54, 67.5, 80, 99.9)] == [1, 1, 8, 64, 64, 8, 1, 1]
    assert ramp.wanted(ramp.fallen) == 1 < ramp.wanted(ramp.fallen - 5)
    assert Ramp(most=1, seconds=10).wanted(5) == 1


def test_windows_are_compared_by_the_time_of_each_engine() -> None:
    clock = Clock()
    ramp = Ramp(most=8, seconds=40.0)
    pair = pair_of(Stub(clock, seconds=0.02), Stub(clock, seconds=0.01, drafts_up_to=1), clock, ramp)
    assert len(pair.plain) == len(pair.speculative) == ramp.windows == 8
    for plain, default in zip(pair.plain, pair.speculative, strict=True):
        assert plain.seconds == pytest.approx(5, abs=0.5)
        assert default.speed / plain.speed == pytest.approx(2, rel=0.05)
    assert max(window.sequence_seconds / window.seconds for window in pair.plain) == pytest.approx(8, abs=0.5)
    assert pair.back_seconds is not None
    assert pair.back_seconds <= 0.1


def test_both_engines_get_the_same_requests() -> None:
    clock = Clock()
    plain, default = Stub(clock, seconds=0.02), Stub(clock, seconds=0.02)
    pair_of(plain, default, clock, Ramp(most=4, seconds=20.0), number=0)
    facts = [[(r.prompt, r.sampling) for r in engine.requests] for engine in (plain, default)]
    assert facts[0] == facts[1]
    assert {r.sampling.temperature for r in plain.requests} == {0.0, 1.0}
    assert not plain.requests[0].speculation.enabled
    assert default.requests[0].speculation.enabled
    salts = [(r.prompt, r.cache_salt) for r in default.requests[ramp_module.WARM_UP_REQUESTS :]]
    assert len({*salts}) == len(salts), "a prompt comes again with a salt of its own"
    assert not plain.has_work
    assert not default.has_work


def test_an_engine_that_never_drafts_again_is_said_so() -> None:
    clock = Clock()
    ramp = Ramp(most=4, seconds=20.0)
    pairs = [pair_of(Stub(clock, seconds=0.02), Stub(clock, seconds=0.02), clock, ramp)]
    found = record(pairs, ramp, {})
    assert found["back_seconds"] == [None]
    assert [verdict["holds"] for verdict in found["verdicts"]] == [True, True, False]
    assert "FAILS: first draft after the load falls, within 2 s: none" in text(found)


def test_verdicts() -> None:
    ramp = Ramp(most=2, seconds=100.0)

    def windows(*slow: float) -> list[Window]:
        return [Window(tokens=100 if i >= len(slow) else int(100 * slow[i]), seconds=5) for i in range(20)]

    plain = windows()
    one_slow = record([Pair(plain, windows(0.95), 0.5)], ramp, {})
    assert one_slow["usual_share"] == pytest.approx(0.95)
    assert [verdict["holds"] for verdict in one_slow["verdicts"]] == [True, True, True]
    two_slow = record([Pair(plain, windows(0.95, 0.89), 2.5)], ramp, {"machine": "m"})
    assert [verdict["holds"] for verdict in two_slow["verdicts"]] == [False, False, False]
    assert two_slow["lowest"] == pytest.approx(0.89)
    assert two_slow["overall"] == pytest.approx(0.992)
    assert json.loads(json.dumps(two_slow))["machine"] == "m"
    empty = record([Pair([Window()] * 20, [Window()] * 20, None)], ramp, {})
    assert empty["lowest"] is None
    assert "unknown" in text(empty)


def test_an_error_of_the_engine_ends_the_ramp() -> None:
    clock = Clock()
    with pytest.raises(EngineDead, match="planted"):
        pair_of(Stub(clock, seconds=0.02), Stub(clock, seconds=0.02, fails_at=20), clock, Ramp(2, 20.0))
