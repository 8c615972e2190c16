"""A server's life: listen, start, say what was chosen and where to look, serve, drain, stop.

SIGTERM or SIGINT: no new requests, those that run get `drain_timeout` seconds; the same again ends them at once, and
once more leaves without a word. SIGHUP: settings are read anew. While it drains the server still answers, so that
/health can say so.

`Wire` is HTTP/1.1 where uvicorn leaves something open: a head that never ends, a reader that never reads, and bad
requests below ASGI that must get an OpenAI error body, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline import __version__
from paceline.errors import InvalidRequest, PacelineError
from paceline.kernels.base import PAGE_SIZE
from paceline.llm import LLM
from paceline.server import logs
from paceline.server.app import create_app
from paceline.server.bridge import Bridge
from paceline.server.guards import STRAIGHT, Live
from paceline.server.problems import error_response
from paceline.server.record import Recorder
from paceline.server.settings import Settings, is_local
from paceline.server.traces import Tracer, toolkit

KEEP_ALIVE = 75  # seconds that an idle connection is kept; longer than most clients and balancers keep theirs
LAST_WORDS = 5  # seconds for answers to leave after the engine has stopped

Chosen = dict[str, str]
Source = Callable[[], Settings]


class Alarm:
    """Calls once, so many seconds after it was first set, unless it is cleared before."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Wire(H11Protocol):
    settings: ClassVar[Settings]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole_app = self.app
        self.app = self._answer
        self._head = Alarm()
        self._write = Alarm()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope[STRAIGHT] = functools.partial(self._send_on, send)
        await self._whole_app(scope, receive, send)

    async def _send_on(self, send: Any, message: Any) -> None:
        """`send` for a body of unknown length that has begun: a chunk needs no h11 to be one."""
        if not (message["more_body"] and message["body"]):
            await send(message)
            return
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(message["body"]), message["body"]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower, as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.clear()
        self._write.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the beginning of another request came along with this one
            self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write.set(self.settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._write.clear()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What h11 would not read. Called where its exception is handled, which knows better than 400."""
        error = sys.exc_info()[1]
        hint = getattr(error, "error_status_hint", 400)
        problem = {431: "the headers are too large", 501: "this transfer encoding is not known here"}
        self._refuse(hint, problem.get(hint, "this is not a valid HTTP request"), "bad_http")

    def _watch_head(self) -> None:
        """The clock runs from the first moment in which a head could come to the one in which it is complete."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._head.clear()
        else:
            self._head.set(self.settings.header_timeout, self._give_up)

    def _give_up(self) -> None:
        if not self.conn.trailing_data[0]:  # a client that connects ahead and has asked nothing is owed no answer
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


class Server(uvicorn.Server):
    """Leaves signals to `Life`, and tells when it listens."""

    def __init__(self, config: uvicorn.Config, *, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._listening()


class Life:
    def __init__(self, bridge: Bridge, settings: Settings, *, source: Source | None, announce: Callable[[], None]):
        self.bridge, self.settings = bridge, settings
        self.app = create_app(bridge, settings)
        self.live: Live = self.app.state.live
        self.live.source = source
        self.live.listeners.append(self._apply)
        if settings.otlp_endpoint is not None:
            self.live.tracer = Tracer(settings.otlp_endpoint, model=bridge.model)
        self.server = Server(_config(self.app, settings), listening=announce)
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await self.bridge.start()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            await self.server.serve(sockets=[listener])
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            await self.bridge.close()
            if self.live.tracer is not None:
                await asyncio.to_thread(self.live.tracer.close)

    def stop(self) -> None:
        """Once to drain, twice to abort, three times to leave."""
        self._signals += 1
        timeout = self.live.settings.drain_timeout if self._signals == 1 else 0.0
        logs.say("stopping", open_requests=self.bridge.open_requests, seconds=timeout)
        self.server.force_exit = self._signals > 2
        task = asyncio.get_running_loop().create_task(self._drain(timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reload(self) -> None:
        try:
            outcome = self.live.reload()
        except PacelineError as error:
            logs.say("settings not reloaded", reason=str(error))
        else:
            logs.say("settings reloaded", changed=outcome["changed"], needs_restart=outcome["needs_restart"])

    async def _drain(self, timeout: float) -> None:
        await self.bridge.drain(timeout)
        self.server.should_exit = True

    def _apply(self, settings: Settings) -> None:
        self.bridge.max_waiting = settings.max_waiting
        self.bridge.stream_interval = settings.stream_interval


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("Wire", (Wire,), {"settings": settings}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # whoever connects is who calls
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_WORDS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def bind(settings: Settings) -> socket.socket:
    """The address is taken before anything slow happens; connections come once the server listens."""
    check_tls(settings)
    if settings.otlp_endpoint is not None:
        toolkit()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on host {settings.host!r}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise InvalidRequest(f"cannot listen on {where}: {error.strerror}; choose another with --port") from None
    return listener


def check_tls(settings: Settings) -> None:
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"cannot use {settings.tls_cert} with {settings.tls_key} for TLS: {error.strerror or error}"
        ) from None


def serve(
    llm: LLM, settings: Settings, *, listener: socket.socket, source: Source | None = None, model: str | None = None
) -> None:
    """Until a signal says stop. `model`: the name that clients see, where the settings have none."""
    name = settings.served_name or model or llm.parts.target.name
    settings = replace(settings, port=listener.getsockname()[1])
    bridge = Bridge(llm, model=name, max_waiting=settings.max_waiting, stream_interval=settings.stream_interval)
    if settings.record is not None:
        bridge.watchers.append(Recorder(settings.record, share=settings.record_share).take)
    life = Life(bridge, settings, source=source, announce=lambda: _announce(chosen(llm, name, settings), settings))
    with asyncio.Runner(loop_factory=life.server.config.get_loop_factory()) as runner:  # uvloop's where it is installed
        runner.run(life.run(listener))
    logs.say("stopped")


def chosen(llm: LLM, name: str, settings: Settings) -> Chosen:
    """What runs, and why."""
    parts, target = llm.parts, llm.parts.target
    memory, kv_bytes = parts.memory, parts.memory.num_pages * parts.memory.page_bytes
    drafters = [f"{drafter}: {made.how}" for drafter, made in parts.drafters.items()]
    exact = "the same bits whatever rides along" if parts.bitwise else "rounding may differ with the batch"
    return {
        "model": f"{name} ({target.why})",
        "device": target.device,
        "weights": ", ".join(f"{part.format} {_size(part.bytes)}" for part in target.parts),
        "drafters": "; ".join(drafters) or "none: plain decoding",
        "bitwise": f"{'yes' if parts.bitwise else 'no'}: {exact}",
        "kv": f"{_size(kv_bytes)} for {memory.num_pages * PAGE_SIZE} tokens, {memory.max_context} a sequence at most",
        "limits": _limits(llm, settings),
        "access": _access(settings),
        **_recording(settings),
    }


def _limits(llm: LLM, settings: Settings) -> str:
    return (
        f"{llm.engine.max_sequences} sequences run, {settings.max_waiting} more may wait, "
        f"{settings.request_timeout:g} s a request, {_size(settings.max_body_bytes)} a body"
    )


def _access(settings: Settings) -> str:
    if settings.api_keys:
        return f"{len(settings.api_keys)} API keys, {'an' if settings.admin_key else 'no'} admin key"
    reach = "this machine" if is_local(settings.host) else "THE NETWORK: set api_keys unless that is meant"
    return f"no API keys: open to everybody on {reach}"


def _recording(settings: Settings) -> Chosen:
    if settings.record is None:
        return {}
    return {"record": f"{settings.record_share:.0%} of the requests, PROMPTS INCLUDED, are kept in {settings.record}"}


def _announce(facts: Chosen, settings: Settings) -> None:
    if settings.log_json:
        logs.say("serving", level=logging.INFO, url=settings.url, **facts)
        return
    lines = [f"Paceline {__version__}", *(f"  {title:<9} {text}" for title, text in facts.items())]
    places = {"": "playground", "/v1": "for OpenAI's clients, as base_url", "/metrics": "for Prometheus"}
    lines += [f"  {settings.url + path:<32} {what}" for path, what in places.items()]
    lines.append("Ctrl-C to stop: running requests end first; once more to abort them")
    print("\n".join(lines), flush=True)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
