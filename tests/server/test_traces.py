"""Traces: one span a request, one a sequence, and its parts, with nothing of the prompt in them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import MissingExtra
from paceline.llm import LLM
from paceline.server.process import bind
from paceline.server.settings import Settings
from paceline.server.traces import Tracer, toolkit
from tests.server.api import MODEL, Api, serving

ENDPOINT = "http://127.0.0.1:9/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


needs_otel = pytest.mark.skipif(not is_installed(), reason="OpenTelemetry is not installed: pip install '.[otel]'")


@pytest.fixture
def traced(llm: LLM) -> Iterator[tuple[Api, Any]]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(ENDPOINT, model=MODEL, exporter=exporter)
    with serving(llm, tracer=tracer) as api:
        yield api, lambda: (tracer.close(), exporter.get_finished_spans())[1]


@needs_otel
def test_a_request_is_a_tree_of_spans(traced: tuple[Api, Any]) -> None:
    api, spans_of = traced
    api.http.headers["traceparent"] = PARENT
    api.complete(prompt="secret", n=2, max_tokens=5, temperature=0, ignore_eos=True)
    api.get("/health")
    spans = spans_of()
    [root] = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(spans) == 1 + 2 * 4  # and none of /health
    assert root.context.trace_id == int(PARENT[3:35], 16)
    assert root.parent.span_id == int(PARENT[36:52], 16)
    assert root.attributes["http.response.status_code"] == 200
    sequences = [span for span in spans if span.name == f"text_completion {MODEL}"]
    assert {span.attributes["paceline.sample"] for span in sequences} == {0, 1}
    for span in sequences:
        assert span.parent.span_id == root.context.span_id
        assert span.attributes["gen_ai.usage.input_tokens"] == 6
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert span.attributes["gen_ai.request.max_tokens"] == 5
        parts = sorted((p for p in spans if p.parent.span_id == span.context.span_id), key=lambda p: p.start_time)
        assert {part.name for part in parts} == {"queue", "prefill", "decode"}
        bounds = {part.name: (part.start_time, part.end_time) for part in parts}
        assert bounds["queue"][0] == span.start_time
        assert bounds["queue"][1] == bounds["prefill"][0] < bounds["prefill"][1] == bounds["decode"][0]
        assert bounds["decode"][1] == span.end_time
    assert "secret" not in "".join(span.to_json() for span in spans)


@needs_otel
def test_a_request_that_is_refused_is_a_span_too(traced: tuple[Api, Any]) -> None:
    api, spans_of = traced
    api.refused("/v1/completions", {"prompt": ""})
    [span] = spans_of()
    assert span.attributes["http.response.status_code"] == 400
    assert span.parent is None


@needs_otel
def test_what_a_client_says_of_a_trace_may_be_nonsense(traced: tuple[Api, Any]) -> None:
    api, spans_of = traced
    api.http.headers["traceparent"] = "00-zz"
    api.get("/v1/models")
    [span] = spans_of()
    assert span.parent is None
    assert span.name == "GET"  # no path of a client's making


def test_without_the_packages_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[otel\]'"):
        toolkit()
    with pytest.raises(MissingExtra):
        bind(Settings(port=0, otlp_endpoint=ENDPOINT))
