"""The server as a process: listen, start, serve, drain, stop.

SIGTERM or SIGINT starts to drain: the server takes no new requests and gives running ones `drain_timeout` seconds. A
second such signal aborts them; a third exits without waiting. SIGHUP reads the settings anew. A draining server still
answers HTTP, so that /health can report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from paceline.errors import InvalidRequest, PacelineError
from paceline.llm import LLM
from paceline.server import logs
from paceline.server.app import create_app
from paceline.server.banner import announce, chosen
from paceline.server.bridge import Bridge
from paceline.server.http1 import Http1
from paceline.server.live import CurrentSettings, Source
from paceline.server.record import Recorder
from paceline.server.settings import Settings
from paceline.server.traces import Tracer, toolkit

KEEP_ALIVE_SECONDS = 75  # life of an idle connection; longer than most clients and balancers keep theirs
LAST_ANSWERS_SECONDS = 5  # time for answers to be sent after the engine has stopped


def bind(settings: Settings) -> socket.socket:
    """Bind the address, before the model is loaded. Connections are accepted once the server listens."""
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
    """Serve until a signal says stop. `model`: the name that clients see if the settings have none."""
    name = settings.served_name or model or llm.parts.target.name
    settings = replace(settings, port=listener.getsockname()[1])
    bridge = Bridge(llm, model=name, max_waiting=settings.max_waiting, stream_interval=settings.stream_interval)
    if settings.record is not None:
        bridge.watchers.append(Recorder(settings.record, share=settings.record_share).take)
    facts = chosen(llm, name, settings)
    process = ServerProcess(bridge, settings, source=source, announce=lambda: announce(facts, settings))
    uvloop_or_asyncio = process.server.config.get_loop_factory()
    with asyncio.Runner(loop_factory=uvloop_or_asyncio) as runner:
        runner.run(process.run(listener))
    logs.say("stopped")


class ServerProcess:
    """One run of the server, from `run` to the signal that ends it. `announce` is called when it listens."""

    def __init__(self, bridge: Bridge, settings: Settings, *, source: Source | None, announce: Callable[[], None]):
        self.bridge, self.settings = bridge, settings
        endpoint = settings.otlp_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, model=bridge.model)
        self.app = create_app(bridge, settings, tracer=self.tracer)
        self.live: CurrentSettings = self.app.state.live
        self.live.source = source
        self.live.listeners.append(self._apply)
        self.server = Server(_config(self.app, settings), listening=announce)
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        gc.collect()
        gc.freeze()  # the model's objects stay: looking through them takes 0.1 s whenever a long body is parsed
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
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    def stop(self) -> None:
        """Drain. A second call aborts running requests; a third exits at once."""
        self._signals += 1
        timeout = self.live.settings.drain_timeout if self._signals == 1 else 0.0
        logs.say("stopping", open_requests=self.bridge.open_requests, seconds=timeout)
        self.server.force_exit = self._signals > 2
        task = asyncio.get_running_loop().create_task(self._drain(timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reload(self) -> None:
        try:
            self.live.reload()
        except PacelineError as error:
            logs.say("settings not reloaded", reason=str(error))

    async def _drain(self, timeout: float) -> None:
        await self.bridge.drain(timeout)
        self.server.should_exit = True

    def _apply(self, settings: Settings) -> None:
        self.bridge.max_waiting = settings.max_waiting
        self.bridge.stream_interval = settings.stream_interval


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to `ServerProcess` and says when it listens."""

    def __init__(self, config: uvicorn.Config, *, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._listening()


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("Http1", (Http1,), {"settings": settings}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the caller is the peer of the connection
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
