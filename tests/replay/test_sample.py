"""What a real run of a sample teaches. The engine that is measured is one on paper, whose times are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.engine import Engine
from paceline.errors import EngineDead
from paceline.kv.cache import KVCache
from paceline.replay.arrivals import Arrival, Schedule
from paceline.replay.calibrate import calibrate, recorded_pace, stretches
from paceline.replay.drafts import given_acceptance
from paceline.replay.meter import measure_passes
from paceline.replay.paper import DrafterTraits, PaperClock, PaperDrafter, PaperForward, script
from paceline.replay.sample import Sampled, run_sample
from paceline.replay.simulate import simulate
from paceline.replay.step_times import PassShape, PassTable, StepTimes
from paceline.runner.lanes import Lanes
from paceline.types import Request, SamplingParams
from tests.replay.recorded import arrival, setting
from tests.rig import LIMITS

TABLE = PassTable({1: 0.01, 257: 0.042}, {1: 0.002, 129: 0.034}, read_token=1e-5, attended_token=2e-5)
KNOWN = StepTimes(
    TABLE, {1: 1.2, 4: 1.5}, {1: 1.6}, (0.0, 1.1), host=(1e-3, 5e-4, 1e-5), draft=(2e-3, 5e-4, 1e-3, 2e-5)
)
TRAITS = DrafterTraits("ngram", max_draft=6, ends_drafts=False, weighs_cost=False)
SIZE = 5  # requests of the sample


def an_engine(known: StepTimes, clock: PaperClock, *, drafts: bool = True) -> tuple[Engine, list[Sampled]]:
    config = EngineConfig.of(**{**LIMITS, "fixed_draft": True, "max_sequences": 4, "max_step_tokens": 32})
    arrivals = [arrival(number, prompt=30 + 11 * number, output=60) for number in range(1, SIZE + 1)]
    scripts = {each.number: script(each, max_draft=config.max_draft, seed=0) for each in arrivals}
    forward = PaperForward(scripts, num_pages=400, times=known, clock=clock)
    guards = {}
    if drafts:
        drafter = PaperDrafter(TRAITS, scripts, given_acceptance(0.7, max_draft=6), known, clock)
        guards["ngram"] = Guard(drafter, vocab_size=forward.vocab_size, timeout=1.0)
    engine = Engine(
        forward,
        config=config,
        lanes=Lanes(count=4, max_context=1024, max_draft=config.max_draft),
        cache=KVCache(forward.kv),
        max_context=1024,
        drafters=guards,
        default_drafter="ngram" if drafts else None,
        clock=clock,
    )
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sample = [
        Sampled(i, Request(id=f"s{i}", prompt=scripts[i].prompt, sampling=replace(sampling, seed=i))) for i in scripts
    ]
    return engine, sample


def test_passes_are_measured_by_rows_logits_and_context() -> None:
    clock, ticks = PaperClock(), []
    flat = replace(KNOWN, plain_scale={1: 1.0}, drafted_scale={1: 1.0}, prompt=(0.0, 1.0), host=(0.0, 0.0, 0.0))
    engine, _ = an_engine(flat, clock)
    table = measure_passes(engine.probes, clock=clock, tick=lambda: ticks.append(1))
    for shape in (PassShape(1, 1, 300, 300), PassShape(4, 4, 800, 800), PassShape(100, 0, 500, 40_000)):
        assert table.seconds(shape) == pytest.approx(TABLE.seconds(shape), rel=0.02)
    assert len(ticks) % 3 == 0
    engine.check()


@pytest.mark.parametrize("constant", [0.0, 4e-3])  # seconds of a pass that reads a prompt, beside its rows
def test_a_sample_teaches_the_times_of_steps(constant: float) -> None:
    known = replace(KNOWN, prompt=(constant, 1.1))
    clock, ended = PaperClock(), []
    engine, sample = an_engine(known, clock)
    table = measure_passes(engine.probes, clock=clock)
    found, rounds = run_sample(engine, sample, table, clock=clock, tick=lambda: ended.append(1))
    assert len(ended) == 2 * 3 * SIZE  # plain and with drafts, of 1, 2 and 4 at once
    for shape in (
        PassShape(1, 1, 80, 80),
        PassShape(4, 4, 320, 320, drawing=4),
        PassShape(7, 7, 80, 560, drafted=True),
        PassShape(60, 1, 60, 1800),
        PassShape(10, 1, 60, 550),
    ):
        assert found.pass_seconds(shape) == pytest.approx(known.pass_seconds(shape), rel=0.08)
    wanted = known.host_seconds(sequences=3, prompt_rows=0)
    assert found.host_seconds(sequences=3, prompt_rows=0) == pytest.approx(wanted, rel=0.1)
    wanted = known.draft_seconds(asks=2, passes=12, fresh=0)
    assert found.draft_seconds(asks=2, passes=12, fresh=0) == pytest.approx(wanted, rel=0.05)
    wanted = known.draft_seconds(asks=1, passes=6, fresh=100)
    assert found.draft_seconds(asks=1, passes=6, fresh=100) == pytest.approx(wanted, rel=0.1)
    assert set(rounds) == {1, 2, 3, 4, 5}
    assert set(rounds[1]) == {1, 2, 4} | set(rounds[1])
    drawn = [each for by_batch in rounds.values() for batch in by_batch.values() for each in batch]
    share = sum(each.accepted for each in drawn) / len(drawn)
    assert share == pytest.approx(sum(0.7**i for i in range(1, 7)), rel=0.15)
    assert engine.drafters["ngram"].listener is None
    engine.check()


def test_a_sample_without_a_drafter_is_plain() -> None:
    clock = PaperClock()
    engine, sample = an_engine(KNOWN, clock, drafts=False)
    found, rounds = run_sample(engine, sample, TABLE, clock=clock)
    assert not rounds
    assert found.draft == (0.0, 0.0, 0.0, 0.0)
    assert found.drafted_scale == found.plain_scale


def test_an_engine_that_dies_ends_the_sample() -> None:
    clock = PaperClock()
    engine, sample = an_engine(replace(KNOWN, host=()), clock)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="while it ran the sample"):
        run_sample(engine, sample, TABLE, clock=clock)
    assert engine.drafters["ngram"].listener is None


# ── calibration ──


def a_schedule(*, scale: float, reading: float = 1.0, drafter: str | None, answers: int = 20) -> Schedule:
    """Arrivals with the times that a machine `scale` times as slow would have recorded."""
    plain = [arrival(i, due=0.3 * i, prompt=40, output=30) for i in range(1, answers + 1)]
    run = simulate(setting(known=KNOWN.scaled(scale, reading=reading), max_step_tokens=64), plain)
    timed: list[Arrival] = []
    for each, outcome in zip(plain, run.outcomes, strict=True):
        stats = {"time_to_first": outcome.ttft, "time_total": outcome.latency, "drafter": drafter}
        timed.append(replace(each, answer=replace(each.answer, stats=stats)))
    return Schedule(tuple(timed), ())


@pytest.mark.unwatched
@pytest.mark.parametrize(("scale", "reading"), [(0.5, 1.0), (1.0, 1.5), (1.7, 0.8)])
def test_a_calibrated_simulation_takes_as_long_as_the_record(scale: float, reading: float) -> None:
    mine = setting("plain", known=KNOWN, max_step_tokens=64, stream_interval=0.1, delivery=0.5)
    schedule = a_schedule(scale=scale, reading=reading, drafter=None)
    found = calibrate([mine], schedule)
    assert found.scale == pytest.approx(scale, rel=0.06)
    assert found.reading == pytest.approx(reading, rel=0.15)
    known = KNOWN.scaled(found.scale, reading=found.reading)
    run = simulate(setting(known=known, max_step_tokens=64), schedule.arrivals)
    own = [
        replace(each, answer=replace(each.answer, stats={"time_to_first": outcome.ttft, "time_total": outcome.latency}))
        for each, outcome in zip(schedule.arrivals, run.outcomes, strict=True)
    ]
    assert recorded_pace(own) == pytest.approx(recorded_pace(schedule.arrivals), rel=0.04)
    assert f"scaled by {found.scale:.3f}, of reading prompts by {found.reading:.3f} more: plain" in found.source


def test_calibration_looks_at_the_whole_record() -> None:
    arrivals = [arrival(i) for i in range(1, 1001)]
    windows = stretches(arrivals)
    assert [len(window) for window in windows] == [50] * 4
    assert (windows[0][0], windows[-1][-1]) == (arrivals[0], arrivals[-1])
    assert [len(window) for window in stretches(arrivals[:201])] == [50] * 4
    assert stretches(arrivals[:200]) == [arrivals[:200]]


@pytest.mark.unwatched
def test_other_work_at_the_beginning_of_a_record_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.replay.calibrate.ANSWERS", 20)
    usual = a_schedule(scale=1.0, drafter=None, answers=60).arrivals
    slowed = [replace(each, answer=replace(each.answer, stats=_slowed(each.answer.stats, 3))) for each in usual[:12]]
    found = calibrate([setting("plain", known=KNOWN, max_step_tokens=64)], Schedule((*slowed, *usual[12:]), ()))
    assert found.scale == pytest.approx(1.0, rel=0.1)


def _slowed(stats: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {**stats, **{name: factor * stats[name] for name in ("time_to_first", "time_total")}}


def test_what_cannot_be_calibrated_says_why() -> None:
    mine = setting("plain", known=KNOWN, max_step_tokens=64)
    for schedule, why in (
        (a_schedule(scale=2.0, drafter="eagle"), "made with eagle, which is not simulated"),
        (Schedule((arrival(1),), ()), "no times of its answers"),
        (replace(a_schedule(scale=2.0, drafter=None), changed=True), "not those of the record"),
    ):
        found = calibrate([mine], schedule)
        assert (found.scale, found.reading) == (1.0, 1.0)
        assert why in found.source
    assert recorded_pace([arrival(1, output=1, time_to_first=1.0, time_total=1.0)]) is None


def test_an_interrupted_calibration_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> object:
        run = simulate(setting(), [arrival(1)])
        run.interrupted = True
        return run

    monkeypatch.setattr("paceline.replay.calibrate.simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate([setting()], a_schedule(scale=1.0, drafter=None))
