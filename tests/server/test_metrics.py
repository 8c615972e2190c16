"""Metrics: names, what is counted when, and what is told of the measured speed-up."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from paceline.engine.stats import EngineStats, Measured, Measurement, Snapshot
from paceline.server.bridge import Bridge
from paceline.server.measured import Decisions, measured_fields, note_of
from paceline.server.metrics import PARTS, Histogram, Metrics, install_metrics
from paceline.types import (
    Finish,
    Off,
    OffKind,
    Origin,
    Request,
    SamplingParams,
    SequenceStats,
    Speculation,
    Speedup,
    TokenEvent,
)
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.runs import prompt
from tests.server.api import Api
from tests.tiny_models import tiny_tokenizer

SNAPSHOT = Snapshot(
    engine=EngineStats(steps=9, output_tokens=41, preemptions=2, wasted=3, time_draft=0.5, time_verify=1.5),
    running=3,
    waiting=2,
    pages_held=30,
    pages_total=120,
    drafters={"ngram": None, "small": "drafter small is out: it raised"},
)
MEASURED = Measurement(
    speedup=Speedup(1.5, 1.4, 1.6),
    groups=(
        Measured(
            "ngram", "3-4", "sampled", Speedup(0.9, 0.8, 0.95), 20, tokens_per_step=1.2, acceptance=0.1, off="paused"
        ),
        Measured("head", "1", "greedy", None, 3, tokens_per_step=2.5, acceptance=0.6, off=None),
    ),
    steps=1200,
    drawn=12,
)
STATS = SequenceStats(
    prompt_tokens=10,
    cached_tokens=4,
    output_tokens=9,
    steps=5,
    rounds=3,
    drafted=12,
    accepted=5,
    accepted_by_position=(3, 1, 1),
    drafter="ngram",
    time_queued=0.1,
    time_to_first=0.2,
    time_total=1.0,
)


def fake_bridge(snapshot: Snapshot = SNAPSHOT, state: str = "ready") -> Bridge:
    return cast(
        Bridge, SimpleNamespace(model="tiny", state=state, stats=lambda: snapshot, listeners=[], integrity_failures=2)
    )


def make(**options: Any) -> Metrics:
    return Metrics(fake_bridge(**options), clock=itertools.count(0.0, 0.02).__next__)


def values(metrics: Metrics) -> dict[str, float]:
    """By name, or `name{label}` where there is a label beside the model's name."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for sample in itertools.chain.from_iterable(family.samples for family in parse(text.decode())):
        labels = dict(sample.labels)
        assert labels.pop("model_name") == "tiny"
        label = ",".join(labels.values())
        found[f"{sample.name}{{{label}}}" if label else sample.name] = sample.value
    return found


def last(stats: SequenceStats = STATS, finish: Finish = Finish.STOP, sample: int = 0, **more: Any) -> TokenEvent:
    return TokenEvent(request_id="r", sample=sample, finish=finish, stats=stats, **more)


def drafted(count: int, accepted: int, **more: Any) -> TokenEvent:
    """A round."""
    origins = (Origin.ACCEPTED,) * accepted + (Origin.BONUS,)
    tokens = tuple(range(accepted + 1))
    return TokenEvent(
        request_id="r", sample=0, tokens=tokens, origins=origins, drafted=count, accepted=accepted, **more
    )


ROUNDS = (drafted(4, 3), drafted(4, 1), drafted(4, 1))


def test_the_engine_is_read_from_the_snapshot() -> None:
    found = values(make())
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:generation_tokens_total"] == 41
    assert found["vllm:num_preemptions_total"] == 2
    assert found["paceline:wasted_total"] == 3
    assert found["paceline:integrity_failures_total"] == 2
    assert found["paceline:step_seconds_total{draft}"] == 0.5
    assert found["paceline:step_seconds_total{verify}"] == 1.5
    assert [found[f"paceline:drafter_ready{{{name}}}"] for name in ("ngram", "small")] == [1, 0]


def test_every_part_of_a_step_is_told() -> None:
    times = {name.removeprefix("time_") for name in EngineStats.__slots__ if name.startswith("time_")}
    assert set(PARTS) == times


@pytest.mark.parametrize("state", ["starting", "ready", "draining", "dead"])
def test_one_state_is_true(state: str) -> None:
    found = values(make(state=state))
    told = {name for name, value in found.items() if name.startswith("paceline:state") and value}
    assert told == {f"paceline:state{{{state}}}"}


def test_no_kv_pages_are_no_division_by_zero() -> None:
    assert values(make(snapshot=Snapshot()))["vllm:kv_cache_usage_perc"] == 0


def test_an_ended_answer_is_counted_once_in_everything() -> None:
    metrics = make()
    metrics.observe(last())
    found = values(metrics)
    assert found["vllm:prompt_tokens_total"] == 10
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (10, 4)
    assert found["vllm:spec_decode_num_drafts_total"] == 0  # its rounds were counted as they came
    assert found["vllm:request_success_total{stop}"] == 1
    assert found["vllm:request_success_total{abort}"] == 0  # there from the start, so that rates are right
    assert found["vllm:time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(1.0)
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.1)
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert found["paceline:answers_total{ngram}"] == 1


def test_rounds_count_while_an_answer_runs() -> None:
    metrics = make()
    for i, event in enumerate(ROUNDS, start=1):
        metrics.observe(event)
        assert values(metrics)["vllm:spec_decode_num_drafts_total"] == i
    metrics.observe(TokenEvent(request_id="r", sample=0, tokens=(1,), origins=(Origin.PLAIN,)))
    found = values(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 12
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 5
    assert [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{i}}}"] for i in range(3)] == [3, 1, 1]
    metrics.observe(drafted(3, 0, finish=Finish.ABORT))
    assert values(metrics)["vllm:spec_decode_num_drafts_total"] == 4


def test_samples_of_a_request_share_its_prompt() -> None:
    metrics = make()
    for sample in range(3):
        metrics.observe(last(sample=sample))
    found = values(metrics)
    assert found["vllm:prompt_tokens_total"] == 10
    assert found["vllm:request_success_total{stop}"] == 3


def test_an_answer_that_never_began_has_no_first_token() -> None:
    metrics = make()
    metrics.observe(last(SequenceStats(prompt_tokens=3, time_to_first=9, time_total=9), Finish.DEADLINE))
    found = values(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 0
    assert found["vllm:request_time_per_output_token_seconds_count"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert found["vllm:request_success_total{deadline}"] == 1


def test_an_end_without_statistics_still_counts() -> None:
    metrics = make()
    metrics.observe(TokenEvent(request_id="r", sample=0, finish=Finish.ERROR))
    assert values(metrics)["vllm:request_success_total{error}"] == 1


def test_gaps_lie_between_arrivals_of_one_answer() -> None:
    metrics = make()  # whose clock goes on by 20 ms at each look
    for sample in (0, 1, 0, 1, 0):
        metrics.observe(TokenEvent(request_id="r", sample=sample, tokens=(1,), origins=(Origin.PLAIN,)))
    metrics.observe(last())  # without tokens: no arrival
    found = values(metrics)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert found[f"{name}_count"] == 3
        assert found[f"{name}_sum"] == pytest.approx(3 * 0.04)


def test_nothing_is_kept_of_answers_that_have_ended() -> None:
    metrics = make()
    for i in range(50):
        token = TokenEvent(request_id=str(i), sample=0, tokens=(1,), origins=(Origin.PLAIN,))
        metrics.observe(token)
        metrics.observe(token._replace(finish=Finish.STOP, stats=STATS))
    assert not metrics._last


def test_buckets_are_cumulative_and_hold_their_upper_bound() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 5):
        histogram.observe(value)
    assert histogram.buckets == [("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 12


def test_openmetrics_where_it_is_asked_for() -> None:
    metrics = make()
    metrics.observe(last())
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert any(family.name == "vllm:spec_decode_num_drafts" for family in parse_openmetrics(text.decode()))


@pytest.mark.parametrize("kind", OffKind)
def test_reasons_are_counted_by_kind_without_numbers_or_names(kind: OffKind) -> None:
    metrics = make()
    metrics.observe(last(replace(STATS, off=Off(kind, "drafter ngram and a 7"))))
    assert values(metrics)[f"paceline:speculation_off_total{{{kind}}}"] == 1
    assert not re.search(r"[0-9]|ngram", kind)


# The estimate.


def test_no_speed_up_is_no_sample_and_a_measured_one_is_three_for_each_group() -> None:
    assert not any(name.startswith(("paceline:speedup", "paceline:drafter_speedup")) for name in values(make()))
    found = {
        (sample.name, sample.labels.get("drafter"), sample.labels.get("batch")): (
            sample.labels.get("kind"),
            sample.value,
        )
        for family in Metrics(fake_bridge(replace(SNAPSHOT, measurement=MEASURED))).collect()
        for sample in family.samples
    }
    for i, end in enumerate(("", "_low", "_high")):
        assert found[f"paceline:speedup{end}", None, None] == (None, (1.5, 1.4, 1.6)[i])
        assert found[f"paceline:drafter_speedup{end}", "ngram", "3-4"] == ("sampled", (0.9, 0.8, 0.95)[i])
    assert ("paceline:drafter_speedup", "head", "1") not in found  # still measuring
    assert found["paceline:drawn_steps_total", None, None] == (None, 12)


def test_what_is_told_of_the_measured_speed_up() -> None:
    told = measured_fields(replace(SNAPSHOT, measurement=MEASURED))
    assert told["speedup"].model_dump() == {"ratio": 1.5, "low": 1.4, "high": 1.6}
    assert (told["speedup_note"], told["drawn_share"]) == (None, 0.01)
    assert [(group.drafter, group.batch, group.off) for group in told["speedups"]] == [
        ("ngram", "3-4", "paused"),
        ("head", "1", None),
    ]
    assert note_of(None) is not None
    assert note_of(replace(MEASURED, speedup=None)) == "measuring: 3 of 8 runs of plain steps so far"
    assert "slower" in str(note_of(replace(MEASURED, speedup=None, groups=MEASURED.groups[:1])))


def test_the_log_tells_a_decision_once_and_not_all_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline.server")
    off = [replace(group, off="paused: 0.90 ×") for group in MEASURED.groups]
    decisions = Decisions()
    for at in (0.0, 1.0, 4.9, 5.1, 20.0):
        decisions.look(replace(SNAPSHOT, measurement=replace(MEASURED, groups=(*off,))), at=at)
    told = [(record.getMessage(), cast(Any, record).facts["drafter"]) for record in caplog.records]
    assert told == [("speculation off", "ngram"), ("speculation off", "head")]
    decisions.look(replace(SNAPSHOT, measurement=replace(MEASURED, groups=())), at=30.0)
    decisions.look(replace(SNAPSHOT, measurement=replace(MEASURED, groups=MEASURED.groups[1:])), at=40.0)
    assert [record.getMessage() for record in caplog.records[2:]] == ["speculation on again"]


def test_what_charts_need() -> None:
    metrics = make()
    assert metrics.speculation()["acceptance_by_position"] == []
    for event in (*ROUNDS, last()):
        metrics.observe(event)
    told = metrics.speculation()
    assert told["acceptance_by_position"] == [1, 1 / 3, 1 / 3]
    assert (told["num_drafts"], told["num_draft_tokens"], told["num_accepted_tokens"]) == (3, 12, 5)
    assert told["answers_by_drafter"] == {"ngram": 1}


# With a real engine behind it.


def test_a_scrape_agrees_with_what_the_engine_said() -> None:
    asyncio.run(_scrape_a_real_engine())


async def _scrape_a_real_engine() -> None:
    tokenizer = tiny_tokenizer()
    engine = build("toy", RIGS["model"], tokenizer=tokenizer).engine
    bridge = Bridge(cast(Any, SimpleNamespace(engine=engine, tokenizer=tokenizer)), model="tiny")
    app = FastAPI()
    metrics = install_metrics(app, bridge)
    assert app.state.metrics is metrics
    await bridge.start()
    sampling = SamplingParams(temperature=0, max_tokens=12, n=2)
    requests = [
        Request(id=str(i), prompt=prompt(9, seed=i, repeat=True), sampling=sampling, speculation=Speculation())
        for i in range(4)
    ]
    streams = [bridge.submit(request) for request in requests]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        during = await client.get("/metrics")  # while the engine's thread is at work
        events = [event for stream in streams for event in [event async for event in stream]]
        after = await client.get("/metrics")
    await bridge.close()
    assert during.status_code == after.status_code == 200
    ended = [event.stats for event in events if event.stats is not None]
    found = values(metrics)
    assert after.headers["content-type"].startswith("text/plain")
    assert found["vllm:generation_tokens_total"] == sum(stats.output_tokens for stats in ended) == 4 * 2 * 12
    assert found["vllm:prompt_tokens_total"] == 4 * 9
    assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(stats.drafted for stats in ended) > 0
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == sum(stats.accepted for stats in ended)
    assert found["vllm:spec_decode_num_drafts_total"] == sum(stats.rounds for stats in ended)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


def test_the_app_counts_every_answer_once(api: Api) -> None:
    answer = api.chat(n=2)
    api.chat_stream()
    assert api.get("/metrics").status_code == 200
    found = values(api.app.state.metrics)
    assert found["vllm:prompt_tokens_total"] == 2 * answer["usage"]["prompt_tokens"]
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
