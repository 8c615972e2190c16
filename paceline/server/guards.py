"""What a request must pass before it reaches a route, from the outside in:

    Trace     gives it an id, writes it to the log, and lets no exception out
    Shape     path, host and headers are of a kind that a client would send
    CORS      only where origins are allowed
    Keys      who is it
    Rates     how often, how many at once
    Bodies    the body is complete, of a size, and JSON without surprises

Plain ASGI: what a route streams is not buffered. Each guard answers by itself what it does not let through, in under a
second, with OpenAI's error body. A body that nobody wants is read and dropped for a moment, so that the client
finds the answer, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import unquote

import numpy as np
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import InvalidRequest
from paceline.server import logs
from paceline.server.problems import ERRORS, error_response, respond
from paceline.server.settings import RELOADABLE, Settings
from paceline.server.traces import Tracer

OPEN = frozenset({"/", "/health", "/ready", "/favicon.ico"})  # without a key
OPEN_BELOW = "/playground/"
CONTROL_BELOW = "/admin/"  # with the admin key, and no other
BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
STRAIGHT = "paceline.send"  # in a scope: the server's own `send`, for what no guard looks at
LINGER = 2.0  # seconds for which an unwanted body is read
MINUTE = 60.0
MOST_CONTAINERS = 100_000  # lists and objects in a body: they cost most to parse
MOST_CALLERS = 4096  # remembered, before those that have been quiet are forgotten

HOST = re.compile(rb"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class Live:
    """The settings in force. Those that may change while the server runs do so here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.source: Callable[[], Settings] | None = None  # reads them anew
        self.listeners: list[Callable[[Settings], None]] = []
        self.tracer: Tracer | None = None  # None: no traces
        self._digests = self._digest(settings)

    def reload(self) -> dict[str, list[str]]:
        """Names of what changed, and of what would if the server were restarted. Raises InvalidRequest and keeps all
        as it is if there is something wrong with the new ones."""
        if self.source is None:
            raise InvalidRequest("this server was started without a source of settings: restart it with new ones")
        wanted = self.source()
        changed = self.settings.changes(wanted)
        now = [name for name in changed if name in RELOADABLE]
        self.settings = replace(self.settings, **{name: getattr(wanted, name) for name in now})
        self._digests = self._digest(self.settings)
        for listener in self.listeners:
            listener(self.settings)
        return {"changed": now, "needs_restart": [name for name in changed if name not in RELOADABLE]}

    def owner(self, key: bytes, *, admin: bool) -> str | None:
        """A name for whoever has this key, the same time for every key; None: nobody has it."""
        given, found = hashlib.sha256(key).digest(), None
        for digest, is_admin in self._digests:
            if hmac.compare_digest(digest, given) and is_admin >= admin:
                found = digest.hex()[:12]
        return found

    @staticmethod
    def _digest(settings: Settings) -> list[tuple[bytes, bool]]:
        keys = [(key, False) for key in settings.api_keys]
        keys += [] if settings.admin_key is None else [(settings.admin_key, True)]
        return [(hashlib.sha256(key.encode()).digest(), admin) for key, admin in keys]


def install_guards(app: FastAPI, settings: Settings) -> Live:
    """Put the guards around an app. Its `state.live` has the settings in force; `POST /admin/reload` renews them."""
    live = Live(settings)
    app.state.live = live
    app.add_api_route("/admin/reload", _reload, methods=["POST"], tags=["control"], responses=ERRORS)
    app.add_middleware(Bodies, live=live)
    app.add_middleware(Rates, live=live)
    app.add_middleware(Keys, live=live)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Shape, live=live)
    app.add_middleware(Trace, live=live)
    return live


async def _reload(request: Request) -> dict[str, list[str]]:
    """Read the settings anew and apply those that may change while the server runs."""
    outcome: dict[str, list[str]] = request.app.state.live.reload()
    logs.say("settings reloaded", changed=outcome["changed"], needs_restart=outcome["needs_restart"])
    return outcome


class Refusal(Exception):
    """Why a guard does not let a request through."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, unread: bool) -> None:
        headers = self.headers | ({"Connection": "close"} if unread else {})
        response = error_response(self.status, self.message, code=self.code, headers=headers)
        await send({"type": "http.response.start", "status": self.status, "headers": response.raw_headers})
        content = b"" if scope["method"] == "HEAD" else bytes(response.body)
        await send({"type": "http.response.body", "body": content, "more_body": unread})
        if unread:
            await _drop_body(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _has_body(scope: Scope) -> bool:
    lengths = _values(scope, b"content-length")
    return bool(_values(scope, b"transfer-encoding")) or any(length.strip(b"0 ") for length in lengths)


class Trace:
    """The request's id, its line in the log, and the last resort: no exception leaves with its text."""

    def __init__(self, app: ASGIApp, live: Live, clock: Callable[[], float] = time.perf_counter) -> None:
        self.app, self.live, self.clock = app, live, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began = self.clock()
        record = logs.Record(
            request_id=_request_id(scope),
            method=scope["method"][:16],
            path=scope["path"][:200],
            wants_prompts=self.live.settings.log_prompts,
        )
        if self.live.tracer is not None:
            record.trace = self.live.tracer.begin(scope["headers"])
        scope.setdefault("state", {})["request_id"] = record.request_id
        scope.setdefault(STRAIGHT, send)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = (b"x-request-id", record.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        token = logs.current.set(record)
        try:
            await self.app(scope, receive, tagged)
        except Exception as error:  # the HTTP boundary
            response = respond(error)
            if not record.status:
                await response(scope, receive, tagged)
        finally:
            logs.current.reset(token)
            record.status = record.status or 499
            record.seconds = self.clock() - began
            record.close()


def _request_id(scope: Scope) -> str:
    given = [value.decode("latin-1") for value in _values(scope, b"x-request-id")]
    sane = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
    return given[0] if sane else f"req-{uuid.uuid4().hex}"


class Guard:
    """A check of what is known before the body. A subclass raises Refusal, or returns."""

    def __init__(self, app: ASGIApp, live: Live) -> None:
        self.app, self.live = app, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope, self.live.settings)
            except Refusal as refusal:
                await refusal.answer(scope, receive, send, unread=_has_body(scope))
                return
        await self.app(scope, receive, send)

    def check(self, scope: Scope, settings: Settings) -> None: ...


class Shape(Guard):
    def check(self, scope: Scope, settings: Settings) -> None:
        self._check_sizes(scope, settings)
        self._check_host(scope, settings)
        self._check_path(scope)
        if scope["method"] in BODILESS and _has_body(scope):
            raise Refusal(400, f"a {scope['method']} request has no body", "unexpected_body")

    def _check_sizes(self, scope: Scope, settings: Settings) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > settings.max_headers or size > settings.max_header_bytes:
            raise Refusal(
                431,
                f"{len(headers)} headers of {size} bytes; {settings.max_headers} headers and "
                f"{settings.max_header_bytes} bytes are allowed",
                "headers_too_large",
            )
        target = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if target > settings.max_header_bytes:
            raise Refusal(414, f"the URL has {target} bytes, {settings.max_header_bytes} are allowed", "url_too_long")

    def _check_host(self, scope: Scope, settings: Settings) -> None:
        hosts = [HOST.fullmatch(value) for value in _values(scope, b"host")]
        if len(hosts) > 1 or None in hosts:
            raise Refusal(400, "the Host header must be one name or address, with a port or without", "bad_host")
        if not all(settings.answers_to(host[1].decode()) for host in hosts if host):
            raise Refusal(400, "this server does not answer to this name; see its option allowed_hosts", "wrong_host")

    def _check_path(self, scope: Scope) -> None:
        path: str = scope["path"]
        if not path.startswith("/"):
            raise Refusal(400, "the path of a request begins with /", "bad_path")
        decoded = unquote(path)  # a second time: what is still encoded was encoded twice
        odd = decoded != path or "//" in path or "\\" in path or not path.isprintable()
        if odd or {".", ".."} & set(path.split("/")):
            raise Refusal(404, "there is no such route; paths are taken literally", "not_found")


class Keys(Guard):
    def check(self, scope: Scope, settings: Settings) -> None:
        path, control = scope["path"], scope["path"].startswith(CONTROL_BELOW)
        scope["caller"] = (scope.get("client") or ("nobody",))[0]
        if path in OPEN or path.startswith(OPEN_BELOW):
            return
        if control and settings.admin_key is None:
            raise Refusal(403, "control routes are off: start the server with an admin key", "control_off")
        if control or settings.api_keys:
            scope["caller"] = self._owner(scope, admin=control)

    def _owner(self, scope: Scope, *, admin: bool) -> str:
        headers = _values(scope, b"authorization")
        if not headers:
            self._refuse("no key was given; send the header `Authorization: Bearer KEY`")
        scheme, _, key = headers[0].partition(b" ")
        owner = self.live.owner(key.strip(b" "), admin=admin)
        if len(headers) > 1 or scheme.lower() != b"bearer" or owner is None:
            self._refuse("this key is not known here, or not for this route; send `Authorization: Bearer KEY` once")
        return owner

    def _refuse(self, message: str) -> NoReturn:
        raise Refusal(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


@dataclass(slots=True)
class Caller:
    """What one key, or one address, did of late."""

    running: int = 0
    began: deque[float] = field(default_factory=deque)  # when, within the last minute


class Rates:
    """Requests a minute and at once, by caller. What only looks (GET) is not counted."""

    def __init__(self, app: ASGIApp, live: Live, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self.live, self.clock = app, live, clock
        self.callers: dict[str, Caller] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS or scope["path"].startswith(CONTROL_BELOW):
            await self.app(scope, receive, send)
            return
        caller = self._caller(scope["caller"])
        try:
            self._check(caller)
        except Refusal as refusal:
            await refusal.answer(scope, receive, send, unread=_has_body(scope))
            return
        caller.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            caller.running -= 1

    def _check(self, caller: Caller) -> None:
        now, settings = self.clock(), self.live.settings
        per_minute, at_once = settings.requests_per_minute_per_key, settings.max_concurrency_per_key
        _forget(caller, now)
        if at_once and caller.running >= at_once:
            _too_many(f"{caller.running} of your requests are running, {at_once} may", 1)
        if per_minute and len(caller.began) >= per_minute:
            wait = caller.began[-per_minute] + MINUTE - now
            _too_many(f"{per_minute} requests a minute are allowed", max(1, math.ceil(wait)))
        if per_minute:
            caller.began.append(now)

    def _caller(self, name: str) -> Caller:
        if name not in self.callers and len(self.callers) >= MOST_CALLERS:
            now = self.clock()
            for caller in self.callers.values():
                _forget(caller, now)
            self.callers = {name: caller for name, caller in self.callers.items() if caller.running or caller.began}
        return self.callers.setdefault(name, Caller())


def _forget(caller: Caller, now: float) -> None:
    while caller.began and caller.began[0] <= now - MINUTE:
        caller.began.popleft()


def _too_many(message: str, seconds: int) -> NoReturn:
    text = f"{message}; try again in {seconds} s"
    raise Refusal(429, text, "rate_limit_exceeded", {"Retry-After": str(seconds)})


class Bodies:
    """Reads a body whole, looks at it, and hands it on."""

    def __init__(self, app: ASGIApp, live: Live) -> None:
        self.app, self.live = app, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS:
            await self.app(scope, receive, send)
            return
        settings, body, complete = self.live.settings, bytearray(), not _has_body(scope)
        try:
            _check_kind(scope, settings)
            complete = await _read(receive, body, settings)
            if body and complete:
                check_json(bytes(body), max_depth=settings.max_json_depth)
        except Refusal as refusal:
            await refusal.answer(scope, receive, send, unread=not complete)
            return
        if not complete:
            return  # the client left
        await self.app(scope, _replay(bytes(body), receive), send)


def _check_kind(scope: Scope, settings: Settings) -> None:
    encodings = [value.strip().lower() for value in _values(scope, b"content-encoding")]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        raise Refusal(415, "compressed bodies are not taken; send it without Content-Encoding", "unsupported_encoding")
    lengths = [int(value) for value in _values(scope, b"content-length") if value.isdigit()]
    if any(length > settings.max_body_bytes for length in lengths):
        _too_large(max(lengths), settings)
    if _has_body(scope) and not _is_json(_values(scope, b"content-type")):
        raise Refusal(415, "the body must be JSON: send `Content-Type: application/json`", "unsupported_content_type")


def _is_json(types: list[bytes]) -> bool:
    if len(types) != 1:
        return False
    kind, *options = [part.strip().lower() for part in types[0].split(b";")]
    charsets = [option.partition(b"=")[2].strip(b'"') for option in options if option.startswith(b"charset=")]
    return kind == b"application/json" and all(charset in (b"utf-8", b"utf8") for charset in charsets)


async def _read(receive: Receive, body: bytearray, settings: Settings) -> bool:
    """False: the client left before the end."""
    try:
        async with asyncio.timeout(settings.read_timeout):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                body += message.get("body", b"")
                if len(body) > settings.max_body_bytes:
                    body.clear()
                    _too_large(None, settings)
                if not message.get("more_body"):
                    return True
    except TimeoutError:
        message_ = f"the body did not arrive within {settings.read_timeout:g} s"
        raise Refusal(408, message_, "body_timeout", {"Connection": "close"}) from None


def _too_large(size: int | None, settings: Settings) -> NoReturn:
    given = "the body" if size is None else f"the body has {size} bytes, which"
    raise Refusal(413, f"{given} is more than the {settings.max_body_bytes} bytes that are allowed", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once; after it what the client does next, which is to leave."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def check_json(body: bytes, *, max_depth: int) -> None:
    """Raise Refusal unless the body is JSON that every parser reads alike: UTF-8 without a mark at its front, no name
    twice in an object, no NaN, no half of a surrogate pair, and no deeper than allowed. The depth comes first, so that
    no parser has to recurse."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        _bad_json("begins with a byte order mark; leave it out")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _bad_json(f"is not UTF-8 at byte {error.start}")
    depth, containers = _nesting(body)
    if depth > max_depth:
        _bad_json(f"is nested deeper than the {max_depth} levels that are allowed")
    if containers > MOST_CONTAINERS:
        _bad_json(f"has {containers} lists and objects, {MOST_CONTAINERS} are allowed")
    try:
        parsed = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        _bad_json(f"is not valid JSON{where}")
    if b"\\ud" in body or b"\\uD" in body:
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            _bad_json("has half of a surrogate pair in a text")


def _nesting(body: bytes) -> tuple[int, int]:
    """How deep brackets are nested at most, and how many open; whether they pair is for the parser to say."""
    brackets = np.frombuffer(JSON_STRING.sub(b"", body).translate(BRACKETS, NO_BRACKETS), dtype=np.int8)
    opens = brackets == ord("[")
    depths = np.cumsum(np.where(opens, np.int8(1), np.int8(-1)), dtype=np.int32)
    return int(depths.max(initial=0)), int(opens.sum())


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        _bad_json(f"has {twice[:100]!r} twice in one object")
    return made


def _constant(name: str) -> NoReturn:
    _bad_json(f"has the value {name}, which is not JSON")


def _bad_json(problem: str) -> NoReturn:
    raise Refusal(400, f"the body {problem}", "invalid_json")
