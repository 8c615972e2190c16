"""The metrics of /metrics, for Prometheus: vLLM's names where vLLM has one, `paceline:` where it has none.

There are two sources. Counts of the engine come from the bridge's snapshot, taken between two steps: a scrape never
races the engine's thread. Facts of single answers come from their events: `Metrics.observe` sees each event once, in
order, on the event loop's thread, where scrapes run too. Labels come from closed sets, never from a client.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline.engine.stats import Measurement
from paceline.kernels.base import PAGE_SIZE
from paceline.server.canary.trial import OPEN, Phase
from paceline.types import Finish, SequenceStats, TokenEvent

if TYPE_CHECKING:
    from paceline.server.bridge import Bridge
    from paceline.server.canary.conductor import Canary

STATES = ("starting", "ready", "draining", "dead")
PARTS = ("plan", "draft", "verify", "accept", "emit", "host", "wait")  # parts of a step: fields time_* of EngineStats
# Upper bounds of histograms, in seconds.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
WHOLE_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
Replicas = Callable[[], Awaitable[Mapping[str, Iterable[Metric]]]]  # metrics of each replica of a cluster by its name


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them: (upper bound, number of values up to it)."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).tolist(), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class Merged:
    """Metrics of several replicas as one page: each sample has the label `replica`."""

    def __init__(self, by_replica: Mapping[str, Iterable[Metric]]) -> None:
        self._by_replica = by_replica

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, found in self._by_replica.items():
            for each in found:
                family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
                family.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in each.samples
                ]
        return families.values()


class Metrics:
    def __init__(self, bridge: Bridge, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bridge = bridge
        self._clock = clock
        self._last: dict[tuple[str, int], float] = {}  # time of the latest token of each open answer
        self._first_token, self._gap, self._each_token = (
            Histogram(FIRST_TOKEN),
            Histogram(NEXT_TOKEN),
            Histogram(NEXT_TOKEN),
        )
        self._whole = Histogram(WHOLE_REQUEST)
        self._queued = Histogram(WHOLE_REQUEST)
        self._prompt_tokens = self._cached_tokens = 0
        self._drafted = 0
        self._drafts: Counter[int] = Counter()  # accepted tokens → number of drafts
        self._finished: Counter[str] = Counter()
        self._drafters: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self.canary: Canary | None = None  # set once there is one to tell of
        self.replicas: Replicas | None = None  # set by a cluster

    def observe(self, event: TokenEvent) -> None:
        """Count an event. Called once for every event that leaves the engine, read or not."""
        key = (event.request_id, event.sample)
        if event.tokens:
            now = self._clock()
            if key in self._last:
                self._gap.observe(now - self._last[key])
            self._last[key] = now
        if event.drafted:
            self._drafted += event.drafted
            self._drafts[event.accepted] += 1
        if event.finish is not None:
            self._last.pop(key, None)
            self._finished[event.finish] += 1
            if event.stats is not None:
                self._observe_answer(event.stats, first=event.sample == 0)

    def _observe_answer(self, stats: SequenceStats, *, first: bool) -> None:
        if first:  # the n answers to a request share their prompt
            self._prompt_tokens += stats.prompt_tokens
            self._cached_tokens += stats.cached_tokens
        self._observe_speculation(stats)
        self._whole.observe(stats.time_total)
        self._queued.observe(stats.time_queued)
        if stats.output_tokens:
            self._first_token.observe(stats.time_to_first)
        if stats.output_tokens > 1:
            self._each_token.observe((stats.time_total - stats.time_to_first) / (stats.output_tokens - 1))

    def _observe_speculation(self, stats: SequenceStats) -> None:
        self._drafters[stats.drafter or "none"] += 1
        if stats.off is not None:
            self._reasons[stats.off.kind] += 1

    def speculation(self) -> dict[str, Any]:
        """Return totals since the start, as /v1/speculation shows them."""
        return {
            "num_drafts": self._drafts.total(),
            "num_draft_tokens": self._drafted,
            "num_accepted_tokens": self._accepted(),
            "acceptance_by_position": self._acceptance(),
            "answers_by_drafter": dict(self._drafters),
            "off_reasons": dict(self._reasons),
        }

    def _acceptance(self) -> list[float]:
        """Return, for position 0, 1, …, the share of drafts that were accepted up to and including it."""
        return [count / self._drafts.total() for count in self._positions()]

    def _positions(self) -> list[int]:
        """Count, for position 0, 1, …, the drafts that were accepted up to and including it."""
        longest = max(self._drafts, default=0)
        return [sum(self._drafts[accepted] for accepted in range(i + 1, longest + 1)) for i in range(longest)]

    def _accepted(self) -> int:
        return sum(accepted * count for accepted, count in self._drafts.items())

    def render(self, accept: str = "", replicas: Mapping[str, Iterable[Metric]] | None = None) -> tuple[bytes, str]:
        """Return the text and its content type: OpenMetrics if `accept` asks for it, else Prometheus' own.

        `replicas`: metrics of all replicas of a cluster by name, this one's among them; None: there is no cluster."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(self if replicas is None else Merged(replicas))
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_engine()
        yield from self._of_requests()
        yield from self._of_speculation()
        yield from self._of_the_speedup()
        if self.canary is not None:
            yield from self._of_the_canary(self.canary)

    def _of_the_engine(self) -> Iterator[Metric]:
        now = self._bridge.stats()
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences in the queue.", now.waiting)
        usage = now.pages_held / now.pages_total if now.pages_total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages held by sequences; 1 is all.", usage)
        yield self._cache_config(now.pages_total)
        yield self._counter("vllm:generation_tokens", "Output tokens.", now.engine.output_tokens)
        yield self._counter(
            "vllm:num_preemptions", "Sequences that had to give their pages up.", now.engine.preemptions
        )
        yield self._counter("paceline:steps", "Steps of the engine.", now.engine.steps)
        yield self._counter("paceline:wasted", "Parts of steps whose sequence had already ended.", now.engine.wasted)
        seconds = {part: getattr(now.engine, f"time_{part}") for part in PARTS}
        yield self._counters("paceline:step_seconds", "Seconds in each part of a step.", "part", seconds)
        yield self._counter(
            "paceline:integrity_failures",
            "Checks of the idle engine that found its KV cache inconsistent.",
            self._bridge.integrity_failures,
        )
        states = {state: float(self._bridge.state == state) for state in STATES}
        yield self._gauges("paceline:state", "1 for the state that the server is in.", "state", states)
        ready = {name: float(out is None) for name, out in now.drafters.items()}
        yield self._gauges(
            "paceline:drafter_ready", "0 for a drafter that failed and is no longer asked.", "drafter", ready
        )

    def _of_requests(self) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.", self._prompt_tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", self._prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", self._cached_tokens)
        finished = {finish.value: self._finished[finish.value] for finish in Finish}
        yield self._counters("vllm:request_success", "Answers by how they ended.", "finished_reason", finished)
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token.", self._first_token
        )
        yield self._histogram("vllm:inter_token_latency_seconds", "Between two arrivals of tokens.", self._gap)
        yield self._histogram("vllm:time_per_output_token_seconds", "The same, under its older name.", self._gap)
        yield self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of an answer, after its first token.", self._each_token
        )
        yield self._histogram("vllm:e2e_request_latency_seconds", "From submission to the end.", self._whole)
        yield self._histogram("vllm:request_queue_time_seconds", "From submission to the first step.", self._queued)

    def _of_speculation(self) -> Iterator[Metric]:
        """Yield counts of all steps so far. They come from one source, so that they agree at every moment."""
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds: drafts that were verified.", self._drafts.total())
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", self._drafted)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", self._accepted()
        )
        positions = {str(position): count for position, count in enumerate(self._positions())}
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft.", "position", positions
        )
        yield self._counters("paceline:answers", "Ended answers by who drafted.", "drafter", self._drafters)
        yield self._counters(
            "paceline:speculation_off", "Ended answers by why they drafted nothing last.", "reason", self._reasons
        )

    def _of_the_speedup(self) -> Iterator[Metric]:
        """Yield the measured speed-up. While it is not known the metrics have no value: a number would mislead."""
        found = self._bridge.stats().measurement or Measurement()
        for i, end in enumerate(("", "_low", "_high")):
            overall = None if found.speedup is None else found.speedup[i]
            yield self._gauge(f"paceline:speedup{end}", "Measured speed over plain decoding.", overall)
            name, labels = f"paceline:drafter_speedup{end}", ["model_name", "drafter", "batch", "kind"]
            family = GaugeMetricFamily(name, "The same by drafter, batch size and kind of requests.", labels=labels)
            for group in found.groups:
                if group.speedup is not None:
                    family.add_metric([self._bridge.model, group.drafter, group.batch, group.kind], group.speedup[i])
            yield family
        yield self._counter("paceline:drawn_steps", "Steps drawn to run plain, to measure the speed-up.", found.drawn)

    def _of_the_canary(self, canary: Canary) -> Iterator[Metric]:
        """Yield the arms of the canary that runs. Without one the metrics have no value, but for its ends."""
        told: dict[str, Any] = canary.described() or {"arms": {}, "phase": None, "ratio_low": None, "ratio_high": None}
        for name in ("requests", "tokens", "drafted", "accepted"):
            values = {arm: float(sums[name]) for arm, sums in told["arms"].items()}
            text = f"Ended requests of the canary by arm: {name}."
            yield self._counters(f"paceline:canary_{name}", text, "arm", values)
        speeds = {arm: sums["tokens_per_second"] for arm, sums in told["arms"].items() if sums["tokens_per_second"]}
        yield self._gauges("paceline:canary_speed", "Tokens a second of decoding by arm.", "arm", speeds)
        for end in ("low", "high"):
            text = "Speed of the canary over the control's."
            yield self._gauge(f"paceline:canary_ratio_{end}", text, told[f"ratio_{end}"])
        phases = {str(phase): float(told["phase"] == phase) for phase in Phase if phase in OPEN}
        yield self._gauges("paceline:canary_phase", "1 for the phase that the canary is in.", "phase", phases)
        ends = Counter(str(trial.phase) for trial in canary.past)
        decided = {str(phase): float(ends[phase]) for phase in Phase if phase not in OPEN}
        yield self._gauges("paceline:canary_decisions", "Latest canaries by their ends.", "outcome", decided)

    def _cache_config(self, pages: int) -> Metric:
        """Tell the size of the KV cache as labels, in vLLM's words: routers compute from them what still fits."""
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "Tokens of a KV page, and pages.", labels=labels)
        family.add_metric([self._bridge.model, str(PAGE_SIZE), str(pages)], 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        if value is not None:
            family.add_metric([self._bridge.model], value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name", label]), values)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._bridge.model], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", label]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
        for value, number in values.items():
            family.add_metric([self._bridge.model, value], number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._bridge.model], buckets=histogram.buckets, sum_value=histogram.sum)
        return family


def install_metrics(app: FastAPI, bridge: Bridge) -> Metrics:
    """Listen to the bridge and serve /metrics. Guards decide who may read it. Sets `app.state.metrics`."""
    metrics = Metrics(bridge)
    bridge.listeners.append(metrics.observe)
    app.state.metrics = metrics

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def scrape(request: Request) -> Response:
        replicas = None if metrics.replicas is None else await metrics.replicas()
        text, content_type = metrics.render(request.headers.get("accept", ""), replicas)
        return Response(text, headers={"content-type": content_type})

    return metrics
