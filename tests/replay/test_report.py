"""Records and texts of a replay: figures, busy time, errors against a real one, and what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.html import page
from paceline.replay.arrivals import Schedule
from paceline.replay.report import (
    errors_against,
    errors_text,
    record,
    recorded_outcomes,
    recorded_run,
    simulated_run,
    text,
    unknowns,
)
from paceline.replay.simulate import simulate
from paceline.types import Grammar, SamplingParams
from tests.replay.recorded import arrival, setting, times

MANY = [arrival(1, output=5), arrival(2, due=0.02, output=5), arrival(3, due=9.0, output=5)]


def test_figures_of_a_simulated_run() -> None:
    found = simulated_run(simulate(setting("plain batch 8"), MANY))
    assert (found["arm"], found["load"], found["completed"], found["failed"]) == ("plain batch 8", "simulated", 3, 0)
    assert found["busy_seconds"] == pytest.approx(0.07 + 0.05)  # two that overlap, and one later
    assert found["device_hours"] == pytest.approx(0.12 / 3600)
    assert found["output_throughput"] == pytest.approx(15 / 9.05)
    assert found["median_tpot_ms"] == pytest.approx(10.0)


def test_text_and_page_hold_both_ways_and_every_note() -> None:
    runs = [
        simulated_run(simulate(setting(name, known=known), MANY))
        for name, known in (
            ("plain batch 8", times(pass_seconds=0.02)),
            ("ngram ≤8 batch 8", times(pass_seconds=0.01)),
        )
    ]
    facts = {"acceptance": "given: 0.7", "scaling": "scaled by 2"}
    found = record(runs, facts, notes=["one <b>note</b>"])
    shown = text(found)
    assert "TPOT 10.0 instead of 20.0 ms" in shown
    assert "acceptance given: 0.7" in shown
    assert "scaled by 2" in shown
    assert "note: one <b>note</b>" in shown
    assert "device hours" in shown
    html = page(found, title="Replay")
    assert "<li>one &lt;b&gt;note&lt;/b&gt;</li>" in html
    assert "ngram ≤8 batch 8" in html


def test_a_partial_result_says_so() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    found = record([simulated_run(simulate(setting("plain batch 8"), MANY, tick=stop))], {}, notes=[])
    assert found["interrupted"]
    assert found["conclusion"].startswith("Interrupted: a part of the traffic. 1 of 3")


def test_errors_are_relative_to_the_real_run() -> None:
    real = {"output_throughput": 100.0, "median_ttft_ms": 50.0, "p99_ttft_ms": 10.0, "median_tpot_ms": None}
    mine = {"output_throughput": 95.0, "median_ttft_ms": 60.0, "p99_ttft_ms": 11.5, "median_tpot_ms": 3.0}
    found = errors_against(mine, real)
    assert [(each["figure"], each["holds"]) for each in found] == [
        ("tokens a second", True),
        ("TTFT p50, ms", False),
        ("TTFT p99, ms", True),
    ]
    assert found[0]["error"] == pytest.approx(-0.05)
    assert "+20.0%  too far" in errors_text(found)


def test_what_the_server_had_measured() -> None:
    timed = [
        replace(each, answer=replace(each.answer, stats={"time_to_first": 0.1, "time_total": 0.5})) for each in MANY
    ]
    found = recorded_run(recorded_outcomes(Schedule(tuple(timed), ())))
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["median_tpot_ms"] == pytest.approx(100)
    assert found["duration"] == pytest.approx(9.5)
    assert found["tokens_per_chunk"] is None
    assert recorded_outcomes(Schedule((timed[0], MANY[1]), ())) == []
    assert recorded_outcomes(Schedule(tuple(timed), (), changed=True)) == []


def test_what_a_simulation_does_not_know_is_said() -> None:
    one = arrival(1)
    told = unknowns(
        Schedule(
            (
                replace(one, request=replace(one.request, sampling=SamplingParams(grammar=Grammar.regex("a")))),
                replace(one, answer=replace(one.answer, finish="abort")),
            ),
            (),
        )
    )
    assert len(told) == 3
    assert "grammar" in told[0]
    assert "aborted" in told[1]
    assert "no pages of answers" in told[2]
    assert unknowns(Schedule((replace(one, answer=replace(one.answer, pages=("x",))),), ())) == []
