"""The server as a process: listen, load, serve, drain, stop.

The server listens before its model is loaded: until then /health and /ready say how far it is, and requests that need
the model are told to come again. A model that cannot be loaded ends the server with its error.

SIGTERM or SIGINT starts to drain: the server takes no new requests and gives running ones `drain_timeout` seconds. A
second such signal aborts them; a third exits without waiting. While the model loads, the first ends the loading. SIGHUP
reads the settings anew. A draining server still answers HTTP, so that /health can report it.

A server that lost a rank of a split model ends its requests and itself with an error: only a new start would help.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from paceline.errors import EngineDead, InvalidRequest, PacelineError, RankLost
from paceline.server import logs
from paceline.server.banner import announce, chosen
from paceline.server.bridge import Bridge
from paceline.server.http1 import LOBBY_CONNECTIONS, Http1
from paceline.server.live import CurrentSettings, Source
from paceline.server.loading import Load
from paceline.server.record import Recorder
from paceline.server.service import Service
from paceline.server.settings import Settings
from paceline.server.traces import toolkit

KEEP_ALIVE_SECONDS = 75  # life of an idle connection; longer than most clients and balancers keep theirs
LAST_ANSWERS_SECONDS = 5  # time for answers to be sent after the engine has stopped
BACKLOG = 2048  # connections that the kernel holds until they are accepted, all at once at worst
OTHER_DESCRIPTORS = 256  # open files that are no connections: logs, models, threads, libraries


def bind(settings: Settings) -> socket.socket:
    """Bind the address, before anything else is done: an address that is in use is an error at once."""
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


def with_descriptors(settings: Settings) -> Settings:
    """Raise the process's limit of open files to what the settings need; lower `max_connections` if that is refused.

    A server without a free descriptor could accept nobody, a probe included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = settings.max_connections + LOBBY_CONNECTIONS + OTHER_DESCRIPTORS
    allowed = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < least + BACKLOG:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(least + BACKLOG, allowed), hard))
    if least <= allowed:
        return settings
    fewer = max(1, allowed - LOBBY_CONNECTIONS - OTHER_DESCRIPTORS)
    logs.say("fewer connections", level=logging.WARNING, max_connections=fewer, reason=f"ulimit -n is {hard}")
    return replace(settings, max_connections=fewer)


def check_tls(settings: Settings) -> None:
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"cannot use {settings.tls_cert} with {settings.tls_key} for TLS: {error.strerror or error}"
        ) from None


def serve(load: Load, settings: Settings, *, listener: socket.socket, source: Source | None = None, model: str) -> None:
    """Listen, load the model, and serve until a signal says stop. Raises what `load` raises.

    `model`: the name that clients see if the settings have none."""
    name = settings.served_name or model
    settings = with_descriptors(replace(settings, port=listener.getsockname()[1]))
    bridge = Bridge(model=name, max_waiting=settings.max_waiting, stream_interval=settings.stream_interval)
    if settings.record is not None:
        recorder = Recorder(
            settings.record, share=settings.record_share, model=name, text=not settings.record_without_text
        )
        bridge.watchers.append(recorder.take)
        bridge.listeners.append(recorder.hear)

    def ready() -> None:
        announce(chosen(bridge.llm, name, settings), settings)

    process = ServerProcess(bridge, settings, source=source, announce=ready, load=load)
    uvloop_or_asyncio = process.server.config.get_loop_factory()
    with asyncio.Runner(loop_factory=uvloop_or_asyncio) as runner:
        runner.run(process.run(listener))
    logs.say("stopped")


class ServerProcess:
    """One run of the server, from `run` to the signal that ends it.

    `announce` is called when it is ready. `load` is called once it listens, unless the bridge has its model already."""

    def __init__(
        self,
        bridge: Bridge,
        settings: Settings,
        *,
        source: Source | None,
        announce: Callable[[], None],
        load: Load | None = None,
    ) -> None:
        self.bridge, self.settings = bridge, settings
        self._announce, self._loads = announce, load is not None
        self.service = Service(bridge, settings, load=load)
        self.app = self.service.app
        self.live: CurrentSettings = self.service.live
        self.live.source = source
        bridge.on_death = self._end_without_ranks
        self.server = Server(_config(self.app, settings))
        self._signals = 0
        self._lost: RankLost | None = None  # why the server ends by itself
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket, *, signals: bool = True) -> None:
        """Serve until `stop`. `signals`: handle those of the process, which only its main thread can."""
        loop = asyncio.get_running_loop()
        self._starting = loop.create_task(self._start())
        every = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.reload}
        handlers = every if signals else {}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            await self.server.serve(sockets=[listener])
            with contextlib.suppress(asyncio.CancelledError):  # a signal came before the model was loaded
                await self._starting
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            await self.service.close()
        if self._lost is not None:
            raise EngineDead(f"the engine stopped: {self._lost}; start the server anew")

    async def _start(self) -> None:
        """Load the model once the server listens, and start to serve. An error ends the server."""
        await self.server.listening.wait()
        try:
            if self._loads:
                logs.say("listening", url=self.settings.url, model=self.bridge.model, state="loading")
            await self.service.start()
            self._announce()
        except BaseException:
            self.server.should_exit = True
            raise

    def stop(self) -> None:
        """Drain. A second call aborts running requests; a third exits at once."""
        self._signals += 1
        if self._starting is not None:
            self._starting.cancel()
        timeout = self.live.settings.drain_timeout if self._signals == 1 else 0.0
        logs.say("stopping", open_requests=self.bridge.open_requests, seconds=timeout)
        self.server.force_exit = self._signals > 2
        task = asyncio.get_running_loop().create_task(self._drain(timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_without_ranks(self) -> None:
        """End the server if its engine died of a lost rank."""
        failure = self.bridge.llm.engine.failure
        if isinstance(failure, RankLost):
            self._lost, self.server.should_exit = failure, True

    def reload(self) -> None:
        try:
            self.live.reload()
        except PacelineError as error:
            logs.say("settings not reloaded", reason=str(error))

    async def _drain(self, timeout: float) -> None:
        await self.bridge.drain(timeout)
        self.server.should_exit = True


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to `ServerProcess` and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("Http1", (Http1,), {"settings": settings, "lobby": {}}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the caller is the peer of the connection
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
