"""Metrics: names, what is counted when, and an estimate of the speed-up that finds the truth where it is known."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from paceline.engine.stats import EngineStats, Snapshot
from paceline.server.bridge import Bridge
from paceline.server.metrics import PARTS, Histogram, Metrics, install_metrics
from paceline.server.speedup import SpeedUp
from paceline.types import Finish, Off, OffKind, Origin, Request, SamplingParams, SequenceStats, Speculation, TokenEvent
from tests.rig import RIGS, build
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
        [label] = labels.values() or [""]
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


def answers(plain: float, cost: float, *, count: int, noise: float, plain_share: float) -> Iterable[SequenceStats]:
    """Answers of a machine on which a step costs `plain` seconds and a round `cost`; a round gives 3 tokens."""
    random = np.random.default_rng(1)
    for _ in range(count):
        steps = int(random.integers(20, 60))
        rounds = round(steps * (1 - plain_share * random.uniform(0.5, 1.5)))
        seconds = ((steps - rounds) * plain + rounds * cost) * random.normal(1, noise)
        yield SequenceStats(
            output_tokens=1 + steps + 2 * rounds,
            steps=1 + steps,
            rounds=rounds,
            time_to_first=0.5,
            time_total=0.5 + seconds,
        )


def estimate_of(stats: Iterable[SequenceStats]) -> Any:
    speedup = SpeedUp()
    for each in stats:
        speedup.observe(each)
    return speedup.estimate()


def test_the_estimate_finds_the_truth() -> None:
    seen = list(answers(0.01, 0.015, count=60, noise=0.05, plain_share=0.3))
    truth = 0.01 * sum(s.output_tokens - 1 for s in seen) / sum(s.time_total - s.time_to_first for s in seen)
    found = estimate_of(seen)
    assert found.low < truth < found.high
    assert found.speedup == pytest.approx(truth, rel=0.1)
    assert 1.2 < found.low < found.high < 3


def test_without_noise_the_estimate_is_exact() -> None:
    found = estimate_of(answers(0.01, 0.04, count=20, noise=0, plain_share=0.4))
    assert found.low <= found.speedup <= found.high < 1  # a round of three tokens costs four steps: slower
    seen = list(answers(0.01, 0.04, count=20, noise=0, plain_share=0.4))
    truth = 0.01 * sum(s.output_tokens - 1 for s in seen) / sum(s.time_total - s.time_to_first for s in seen)
    assert found.speedup == pytest.approx(truth)


def test_more_answers_make_the_interval_narrower() -> None:
    few, many = (estimate_of(answers(0.01, 0.015, count=n, noise=0.1, plain_share=0.3)) for n in (12, 200))
    assert many.high - many.low < few.high - few.low


def test_plain_answers_tell_what_a_plain_step_costs() -> None:
    drafted = [SequenceStats(output_tokens=91, steps=31, rounds=30, time_total=0.6)] * 10
    assert estimate_of(drafted) is None  # rounds only: nothing to hold them against
    plain = [SequenceStats(output_tokens=31, steps=31, rounds=0, time_total=0.3)] * 10
    assert estimate_of([*drafted, *plain]).speedup == pytest.approx(1.5)


def test_an_estimate_takes_in_every_answer_that_ends() -> None:
    speedup = SpeedUp()
    seen = list(answers(0.01, 0.015, count=30, noise=0.05, plain_share=0.3))
    for stats in seen[:20]:
        speedup.observe(stats)
    before = speedup.estimate()
    assert speedup.estimate() is before  # nothing new: nothing to compute
    speedup.observe(seen[20])
    assert speedup.estimate() == estimate_of(seen[:21]) != before


@pytest.mark.parametrize("count", [0, 1, SpeedUp.MIN_ANSWERS - 1])
def test_too_few_answers_are_no_estimate(count: int) -> None:
    assert estimate_of(answers(0.01, 0.015, count=count, noise=0.05, plain_share=0.3)) is None


def test_no_rounds_are_no_speed_up() -> None:
    assert estimate_of([SequenceStats(output_tokens=31, steps=31, time_total=0.3)] * 20) is None


def test_answers_without_a_second_token_say_nothing() -> None:
    assert estimate_of([SequenceStats(output_tokens=1, steps=1, time_total=0.3)] * 20) is None


def test_no_estimate_is_no_sample_and_an_estimate_is_three() -> None:
    metrics = make()
    assert not any(name.startswith("paceline:estimated_speedup") for name in values(metrics))
    for stats in answers(0.01, 0.015, count=20, noise=0.05, plain_share=0.3):
        metrics.observe(last(stats))
    found = values(metrics)
    low, middle, high = (found[f"paceline:estimated_speedup{end}"] for end in ("_low", "", "_high"))
    assert 1 < low <= middle <= high


def test_aborted_answers_do_not_enter_the_estimate() -> None:
    metrics = make()
    for stats in answers(0.01, 0.015, count=20, noise=0.05, plain_share=0.3):
        metrics.observe(last(stats, Finish.ABORT))
    assert metrics.speculation()["speedup"] is None


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
