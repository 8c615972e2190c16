"""OpenTelemetry traces of requests. Off, at no cost, unless the setting `otlp_endpoint` says where to send them.

    POST /v1/chat/completions ───────────────────────   the HTTP request; continues the client's `traceparent`
      chat smollm2            ──────────────────────    one a sequence, by the conventions for generative AI
        queue                 ──
        prefill                 ───────                 until the first token
        decode                         ─────────────

Spans are made when a request has ended, from the times that the engine measured: nothing is done while tokens come. No
text of a prompt or an answer is in them. A collector that cannot be reached costs traces, never a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from paceline import __version__
from paceline.errors import MissingExtra
from paceline.server.logs import PROBES, Record
from paceline.types import Request, SequenceStats, TokenEvent

OPERATIONS = {  # path → name in the conventions
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
}
CARRIED = (b"traceparent", b"tracestate")  # headers that carry the client's trace
NANOSECONDS = 1_000_000_000  # nanoseconds per second


class Tracer:
    def __init__(self, endpoint: str, *, model: str, exporter: Any = None) -> None:
        """`exporter` replaces OTLP over HTTP to `endpoint`. Raises MissingExtra if OpenTelemetry is missing."""
        kit = toolkit()
        resource = kit.Resource.create({"service.name": "paceline", "service.version": __version__})
        self._provider = kit.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(kit.BatchSpanProcessor(exporter or kit.OTLPSpanExporter(endpoint=endpoint)))
        self._spans = self._provider.get_tracer("paceline", __version__)
        self._propagator = kit.TraceContextTextMapPropagator()
        self._api = kit.trace
        self._model = model

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpans:
        """Start the spans of a request that came with these headers."""
        carried = {name.decode(): value.decode("latin-1") for name, value in headers if name in CARRIED}
        return RequestSpans(self, self._propagator.extract(carried))

    def close(self) -> None:
        """Send the spans that are left. May take seconds."""
        self._provider.shutdown()

    def write(self, record: Record, parent: Any, began: int, ends: Iterable[tuple[Request, TokenEvent, int]]) -> None:
        operation = OPERATIONS.get(record.path)
        name = record.method if operation is None else f"{record.method} {record.path}"
        attributes = {
            "http.request.method": record.method,
            "http.response.status_code": record.status,
            "url.path": record.path,
            "paceline.request_id": record.request_id,
        }
        kind = self._api.SpanKind.SERVER
        span = self._spans.start_span(name, context=parent, kind=kind, start_time=began, attributes=attributes)
        if record.status >= 500:
            span.set_status(self._api.StatusCode.ERROR)
        inside = self._api.set_span_in_context(span)
        for request, event, ended in ends:
            self._write_sequence(inside, operation or "generate", request, event, ended)
        span.end(began + int(record.seconds * NANOSECONDS))

    def _write_sequence(self, parent: Any, operation: str, request: Request, event: TokenEvent, ended: int) -> None:
        stats = event.stats or SequenceStats()
        began = ended - int(stats.time_total * NANOSECONDS)
        admitted, first = began + int(stats.time_queued * NANOSECONDS), began + int(stats.time_to_first * NANOSECONDS)
        attributes = self._attributes(operation, request, event, stats)
        name = f"{operation} {self._model}"
        span = self._spans.start_span(name, context=parent, start_time=began, attributes=attributes)
        if event.finish in ("error", "deadline"):
            span.set_status(self._api.StatusCode.ERROR, event.finish.value)
        inside = self._api.set_span_in_context(span)
        for part, start, end in (("queue", began, admitted), ("prefill", admitted, first), ("decode", first, ended)):
            self._spans.start_span(part, context=inside, start_time=start).end(max(start, end))
        span.end(ended)

    def _attributes(
        self, operation: str, request: Request, event: TokenEvent, stats: SequenceStats
    ) -> Mapping[str, Any]:
        sampling = request.sampling
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": [event.finish.value] if event.finish else None,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
            "paceline.sample": event.sample,
            "paceline.drafter": stats.drafter,
            "paceline.rounds": stats.rounds,
            "paceline.drafted": stats.drafted,
            "paceline.accepted": stats.accepted,
            "paceline.off_reason": stats.off_reason,
        }
        return {name: value for name, value in attributes.items() if value is not None}


class RequestSpans:
    """The spans of one HTTP request, collected until it has ended."""

    def __init__(self, tracer: Tracer, parent: Any) -> None:
        self._tracer = tracer
        self._parent = parent
        self._began = time.time_ns()
        self._ends: list[tuple[Request, TokenEvent, int]] = []

    def add(self, request: Request, event: TokenEvent) -> None:
        """Note a sequence that has ended."""
        self._ends.append((request, event, time.time_ns()))

    def write(self, record: Record) -> None:
        """Write the spans, now that the request and its sequences have ended."""
        if record.path not in PROBES:
            self._tracer.write(record, self._parent, self._began, self._ends)


def toolkit() -> SimpleNamespace:
    """Import the parts of OpenTelemetry that are used. Raises MissingExtra if one is missing."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        raise MissingExtra("traces need OpenTelemetry", extra="otel") from None
    return SimpleNamespace(
        trace=trace,
        OTLPSpanExporter=OTLPSpanExporter,
        Resource=Resource,
        TracerProvider=TracerProvider,
        BatchSpanProcessor=BatchSpanProcessor,
        TraceContextTextMapPropagator=TraceContextTextMapPropagator,
    )
