"""The server's log: a line for each request, for people or as JSON. No text of a prompt unless `log_prompts` is set.

A `Record` becomes the line of one HTTP request. The guard `Trace` makes it and closes it. In between the bridge adds
the work of the engine; it finds the record by context, since a route submits within its request. If the client leaves
early, the line is written once the engine has stopped: each line says how its sequences ended.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from paceline.types import Request, TokenEvent

logger = logging.getLogger("paceline.server")
PROBES = frozenset({"/health", "/ready", "/metrics"})  # paths that monitors request every few seconds
PAGE = ("/playground/", "/v1/speculation")  # paths that an open playground requests, the second again and again


class Spans(Protocol):
    """The spans of one HTTP request, for OpenTelemetry: see `server.traces`."""

    def add(self, request: Request, event: TokenEvent) -> None: ...

    def write(self, record: Record) -> None: ...


@dataclass(slots=True)
class Record:
    """Facts of one HTTP request, collected for its line."""

    request_id: str
    method: str
    path: str
    wants_prompts: bool = False
    began: float = 0.0  # time on `time.perf_counter`
    status: int = 0  # HTTP status; 0 until a response begins, 499 if the client left before
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    time_to_first: float | None = None  # seconds; the least of its sequences
    running: int = 0  # sequences that have not ended
    closed: bool = False  # True once nothing more goes to the client
    finishes: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    spans: Spans | None = None  # None: traces are off

    def count(self, request: Request, event: TokenEvent) -> None:
        """Count a sequence that has ended."""
        finish, stats = event.finish, event.stats
        assert finish is not None, "only a last event ends a sequence"
        assert stats is not None, "a last event has statistics"
        if self.spans is not None:
            self.spans.add(request, event)
        self.prompt_tokens += stats.prompt_tokens
        self.output_tokens += stats.output_tokens
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        if stats.output_tokens:
            first = stats.time_to_first
            self.time_to_first = first if self.time_to_first is None else min(first, self.time_to_first)
        self.finishes.append(finish.value)
        self.leave(1)

    def leave(self, sequences: int) -> None:
        """Note that some sequences no longer run; write the line if it waited for them."""
        self.running -= sequences
        if self.closed and not self.running:
            self._write()

    def close(self) -> None:
        """Note that the client has its answer or has left; write the line unless sequences still run."""
        self.closed = True
        if not self.running:
            self._write()

    def _write(self) -> None:
        facts: dict[str, Any] = {"status": self.status, "seconds": round(self.seconds, 6)}
        if self.finishes:
            facts |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
            facts |= {"drafted": self.drafted, "accepted": self.accepted, "finish": ",".join(self.finishes)}
        if self.time_to_first is not None:
            facts["time_to_first"] = round(self.time_to_first, 6)
        if self.prompts:
            facts["prompts"] = self.prompts
        level = logging.WARNING if self.status >= 500 else logging.INFO
        if self.path in PROBES or (self.status < 400 and self.path.startswith(PAGE)):
            level = logging.DEBUG
        if self.spans is not None:
            self.spans.write(self)
        say("request", level=level, request_id=self.request_id, method=self.method, path=self.path, **facts)


current: ContextVar[Record | None] = ContextVar("current", default=None)


def say(event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    logger.log(level, event, extra={"facts": facts})


class Readable(logging.Formatter):
    """Lines for people: `08:15:02 request method=POST status=200 …`. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        words = [f"{name}={_shown(value)}" for name, value in facts.items()]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = " ".join([clock, record.getMessage(), *words])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": record.created, "level": record.levelname.lower(), "event": record.getMessage()}
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


def start_log(*, as_json: bool, verbose: bool = False, stream: TextIO | None = None) -> None:
    """Write the log of Paceline and of the HTTP server to `stream`, by default stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Readable())
    for name, level in (("paceline", logging.DEBUG if verbose else logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level)


def _shown(value: Any) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain and text else json.dumps(text)
