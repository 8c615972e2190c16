"""The outermost guard: the request's id, its line in the log, and the last resort for exceptions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server import logs
from paceline.server.dialects import dialect_of
from paceline.server.guards.check import values
from paceline.server.live import CurrentSettings
from paceline.server.problems import respond
from paceline.server.traces import Tracer

DIRECT_SEND = "paceline.send"  # key in a scope: the HTTP server's own `send`, past all guards
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Trace:
    """Middleware that follows a request from arrival to last byte. No text of an exception reaches the client."""

    def __init__(
        self,
        app: ASGIApp,
        live: CurrentSettings,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.app, self.live, self.tracer, self.clock = app, live, tracer, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._follow(scope, receive, send)

    async def _follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record(scope)
        scope.setdefault("state", {})["request_id"] = record.request_id
        scope.setdefault(DIRECT_SEND, send)
        named = [(header, record.request_id.encode()) for header in dialect_of(scope["path"]).id_headers]

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        token = logs.current.set(record)
        try:
            await self.app(scope, receive, tagged)
        except Exception as error:  # the HTTP boundary
            response = respond(error, path=scope["path"])
            if not record.status:
                await response(scope, receive, tagged)
        finally:
            logs.current.reset(token)
            record.status = record.status or 499
            record.seconds = self.clock() - record.began
            record.close()

    def _record(self, scope: Scope) -> logs.Record:
        return logs.Record(
            request_id=_request_id(scope),
            method=scope["method"][:16],
            path=scope["path"][:200],
            wants_prompts=self.live.settings.log_prompts,
            began=self.clock(),
            spans=None if self.tracer is None else self.tracer.begin(scope["headers"]),
        )


def _request_id(scope: Scope) -> str:
    """Take the client's id if it gave one that is harmless in a log; make one otherwise."""
    given = [value.decode("latin-1") for value in values(scope, b"x-request-id")]
    sane = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
    return given[0] if sane else f"req-{uuid.uuid4().hex}"
