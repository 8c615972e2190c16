"""HTTP/1.1 with limits that uvicorn lacks: on time and connections. Errors below ASGI have OpenAI's body.

A client that never completes its headers, or never reads its answer, is cut off.

    connections   1 ............ max_connections │ ... LOBBY_CONNECTIONS
                  served                         │ probes are answered, other requests are told to come again

A connection in the lobby serves one request. If the lobby is full, its oldest connection gives up its place, so that a
probe is answered however many sockets somebody holds open.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.guards.check import Refusal, has_body
from paceline.server.guards.trace import DIRECT_SEND
from paceline.server.logs import PROBES
from paceline.server.problems import error_response
from paceline.server.settings import Settings

LOBBY_CONNECTIONS = 64  # open beyond max_connections
FULL = Refusal(
    503, "all connections of this server are taken; try again later", "too_many_connections", {"Retry-After": "1"}
)


class Alarm:
    """A timer that calls once: `seconds` after it was first set, unless it is cleared before."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Http1(H11Protocol):
    """One connection."""

    settings: ClassVar[Settings]
    lobby: ClassVar[dict[Http1, None]]  # connections beyond max_connections, the oldest first

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole_app = self.app
        self.app = self._answer
        self._head = Alarm()
        self._write = Alarm()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self in self.lobby:
            await self._answer_in_lobby(scope, receive, send)
            return
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope[DIRECT_SEND] = functools.partial(self._send_on, send)
        await self._whole_app(scope, receive, send)

    async def _answer_in_lobby(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES:
            await self._whole_app(scope, receive, send_last)
        else:
            await FULL.answer(scope, receive, send_last, unread=has_body(scope))

    async def _send_on(self, send: Any, message: Any) -> None:
        """Write one chunk of a chunked response that has begun, framed here, since h11 is not needed for that."""
        if not (message["more_body"] and message["body"]):
            await send(message)
            return
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(message["body"]), message["body"]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower, as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) - len(self.lobby) > self.settings.max_connections:
            self.lobby[self] = None
            if len(self.lobby) > LOBBY_CONNECTIONS:
                next(iter(self.lobby))._leave_at_once()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.clear()
        self._write.clear()
        self.lobby.pop(self, None)
        super().connection_lost(exc)

    def _leave_at_once(self) -> None:
        """Abort the connection, and stop counting it before the transport reports its end."""
        del self.lobby[self]
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # part of the next request came along with this one
            self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write.set(self.settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._write.clear()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 could not parse. uvicorn calls this while it handles h11's exception,
        which has the status."""
        error = sys.exc_info()[1]
        hint = getattr(error, "error_status_hint", 400)
        problem = {431: "the headers are too large", 501: "this transfer encoding is not known here"}
        self._refuse(hint, problem.get(hint, "this is not a valid HTTP request"), "bad_http")

    def _watch_head(self) -> None:
        """Time the headers of a request: from the moment at which they could arrive until they are complete."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._head.clear()
        else:
            self._head.set(self.settings.header_timeout, self._give_up)

    def _give_up(self) -> None:
        if not self.conn.trailing_data[0]:  # a client that connected ahead and asked nothing needs no answer
            self.transport.close()
            return
        seconds = self.settings.header_timeout
        self._refuse(408, f"the headers did not arrive within {seconds:g} s", "header_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            answer = error_response(status, message, code=code, headers={"Connection": "close"})
            start = h11.Response(status_code=status, headers=answer.raw_headers)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
