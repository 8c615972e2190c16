"""What the guards let through, what they refuse, and how."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from paceline.errors import InvalidRequest
from paceline.server import guards, logs
from paceline.server.guards import MOST_CALLERS, Live, Rates, Refusal, check_json, install_guards
from paceline.server.problems import install_problems
from paceline.server.settings import Settings

T = TypeVar("T")
KEY, ADMIN = "sk-right", "sk-admin"
JSON = {"content-type": "application/json"}


def aio(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=20))


def an_app(**options: Any) -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    install_problems(app)

    @app.post("/v1/echo")
    async def echo(request: Request) -> Any:
        return {"body": await request.json(), "id": request.state.request_id}

    @app.get("/v1/models")
    @app.get("/health")
    @app.get("/metrics")
    @app.get("/")
    @app.get("/playground/app.js")
    async def fine() -> dict[str, bool]:
        return {"fine": True}

    @app.get("/v1/boom")
    async def boom() -> None:
        raise RuntimeError("/secret/path")

    install_guards(app, Settings.of(**{"allowed_hosts": ("*",)} | options))
    return app


async def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, client=("1.2.3.4", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, **options)


def ask(app: FastAPI, method: str = "POST", path: str = "/v1/echo", **options: Any) -> httpx.Response:
    return aio(call(app, method, path, **options))


def refused(response: httpx.Response, status: int) -> str:
    """The message; the body is one that OpenAI's clients read."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    assert response.headers["x-request-id"]
    return str(error["message"])


def send(app: FastAPI, content: bytes, **headers: str) -> httpx.Response:
    return ask(app, content=content, headers=JSON | {name.replace("_", "-"): value for name, value in headers.items()})


def test_a_good_request_passes() -> None:
    response = ask(an_app(), json={"a": [1, {"b": "é\U0001f600"}]})
    assert response.status_code == 200
    assert response.json()["body"] == {"a": [1, {"b": "é\U0001f600"}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff\xfe{\x00}\x00", "byte order mark"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ["\\uDC00x"]}', "surrogate"),
        (b'{"a": 1', "line 1, column 8"),
        (b'{"a": }', "line 1, column 7"),
        (b"}{", "line 1, column 1"),
        (b'{"a": "' + b"[" * 50, "line 1, column 7"),
        (b"1" * 5000, "not valid JSON"),
        (b"[" * 10_000 + b"]" * 10_000, "deeper than the 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than the 64"),
    ],
)
def test_bad_json(content: bytes, message: str) -> None:
    assert message in refused(send(an_app(), content), 400)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":' * 64 + b"1" + b"}" * 64,
        b'["' + b"[" * 1000 + b'"]',
        b'["\\"[[[[", "\\\\", "[\\\\\\""]',
        b'{"a": "\\ud83d\\ude00"}',
        b'[{"a": 1}, {"a": 2}]',
        b"null",
    ],
)
def test_odd_but_valid_json(content: bytes) -> None:
    check_json(content, max_depth=64)


def test_json_that_costs_much_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards.json, "loads", lambda *args, **options: pytest.fail("it was"))
    with pytest.raises(Refusal, match="1000002 lists and objects"):
        check_json(b"[" + b"[]," * 1_000_000 + b"{}]", max_depth=64)
    with pytest.raises(Refusal, match="deeper"):
        check_json(b"[" * 4_000_000, max_depth=64)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/jsonp"},
        JSON | {"content-encoding": "gzip"},
        JSON | {"content-encoding": "identity, br"},
        {},
    ],
)
def test_other_kinds_of_bodies(headers: dict[str, str]) -> None:
    refused(ask(an_app(), content=b"{}", headers=headers), 415)


def test_a_charset_may_be_named() -> None:
    response = ask(an_app(), content=b"{}", headers={"content-type": 'Application/JSON; Charset="UTF-8"'})
    assert response.status_code == 200


def test_a_body_of_announced_size() -> None:
    app = an_app(max_body_bytes=100)
    assert "120 bytes" in refused(send(app, b" " * 118 + b"{}"), 413)
    assert send(app, b" " * 98 + b"{}").status_code == 200


def test_a_body_that_announces_nothing() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 10

    response = ask(an_app(max_body_bytes=100), content=chunks(), headers=JSON)
    assert "more than the 100 bytes" in refused(response, 413)
    assert response.headers["connection"] == "close"


class Wire:
    """One request by hand: `messages` arrive, then nothing more."""

    def __init__(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **scope: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.messages = list(messages)
        given = {"host": "server", "transfer-encoding": "chunked"} | JSON | (headers or {})
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/echo",
            "raw_path": b"/v1/echo",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("1.2.3.4", 5),
        } | scope

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if "status" in message), None)


def test_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LINGER", 0.01)
    wire = Wire({"type": "http.request", "body": b"{", "more_body": True})
    aio(an_app(read_timeout=0.01)(wire.scope, wire.receive, wire.send))
    assert wire.status == 408
    assert (b"connection", b"close") in wire.sent[0]["headers"]
    assert not wire.sent[-1]["more_body"]


def test_an_unwanted_body_is_dropped_after_the_answer() -> None:
    part = {"type": "http.request", "body": b"x" * 100, "more_body": True}
    wire = Wire(*[part] * 5, {"type": "http.request", "body": b""}, path="/v1/echo")
    aio(an_app(api_keys=(KEY,))(wire.scope, wire.receive, wire.send))
    assert wire.status == 401
    assert not wire.messages


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    wire = Wire({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.sent == []


def test_a_route_learns_that_its_client_left() -> None:
    app, left = an_app(), []

    @app.post("/v1/wait")
    async def wait(request: Request) -> None:
        await request.body()
        left.append((await request.receive())["type"])

    body = {"type": "http.request", "body": b"{}", "more_body": False}
    wire = Wire(body, {"type": "http.disconnect"}, path="/v1/wait")
    aio(app(wire.scope, wire.receive, wire.send))
    assert left == ["http.disconnect"]


def test_streams_are_not_held_back() -> None:
    app, seen = an_app(), []

    @app.post("/v1/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for i in range(3):
                seen.append([message.get("body") for message in wire.sent if "body" in message])
                yield str(i).encode()

        return StreamingResponse(parts())

    wire = Wire({"type": "http.request", "body": b"{}", "more_body": False}, path="/v1/stream")
    aio(app(wire.scope, wire.receive, wire.send))
    assert seen == [[], [b"0"], [b"0", b"1"]]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ([], 401),
        ([""], 401),
        (["Bearer"], 401),
        (["Bearer "], 401),
        ([KEY], 401),
        ([f"Basic {KEY}"], 401),
        ([f"Bearer {KEY[:-1]}"], 401),
        ([f"Bearer {KEY}x"], 401),
        ([f"Bearer {KEY.upper()}"], 401),
        ([f"Bearer {KEY}", f"Bearer {KEY}"], 401),
        (["Bearer wrong", f"Bearer {KEY}"], 401),
        ([f"Bearer {KEY}"], 200),
        ([f"bearer  {KEY}"], 200),
        (["Bearer sk-other"], 200),
        ([f"Bearer {ADMIN}"], 200),
    ],
)
def test_keys(authorization: list[str], status: int) -> None:
    app = an_app(api_keys=(KEY, "sk-other"), admin_key=ADMIN)
    headers = [("authorization", value) for value in authorization]
    for path in ("/v1/models", "/metrics"):
        response = ask(app, "GET", path, headers=headers)
        assert response.status_code == status
        if status == 401:
            refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/playground/app.js"):
        assert ask(app, "GET", path, headers=headers).status_code == 200


def test_unknown_routes_need_a_key_too() -> None:
    refused(ask(an_app(api_keys=(KEY,)), "GET", "/openapi.json"), 401)
    refused(ask(an_app(api_keys=(KEY,)), "OPTIONS", "/v1/echo"), 401)


def test_control_routes_need_the_admin_key() -> None:
    def reload(app: FastAPI, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return ask(app, path="/admin/reload", headers=headers)

    refused(reload(an_app(), None), 403)
    refused(reload(an_app(api_keys=(KEY,)), KEY), 403)
    app = an_app(api_keys=(KEY,), admin_key=ADMIN)
    refused(reload(app, KEY), 401)
    refused(reload(app, None), 401)
    assert "without a source" in reload(app, ADMIN).json()["error"]["message"]


def test_reloading() -> None:
    app = an_app(admin_key=ADMIN)
    live: Live = app.state.live
    new = replace(live.settings, max_body_bytes=10, port=9999, api_keys=(KEY,), host="0.0.0.0")
    heard: list[Settings] = []
    live.source = lambda: new
    live.listeners.append(heard.append)
    response = ask(app, path="/admin/reload", headers={"authorization": f"Bearer {ADMIN}"})
    assert response.json() == {"changed": ["api_keys", "max_body_bytes"], "needs_restart": ["host", "port"]}
    assert heard == [live.settings]
    assert live.settings.port == 8000
    refused(ask(app, "GET", "/v1/models"), 401)
    refused(ask(app, content=b'{"a": 1234567}', headers=JSON | {"authorization": f"Bearer {KEY}"}), 413)


def test_a_failed_reload_changes_nothing() -> None:
    def fail() -> Settings:
        raise InvalidRequest("port must be a whole number")

    live = Live(Settings())
    live.source = fail
    with pytest.raises(InvalidRequest):
        live.reload()
    assert live.settings == Settings()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("//v1/models", 404),
        ("/v1//models", 404),
        ("/v1/../health", 404),
        ("/v1/%2e%2e/health", 404),
        ("/v1/%252e%252e/health", 404),
        ("/./health", 404),
        ("/v1%2fmodels", 200),
        ("/%2fv1/models", 404),
        ("/v1\\models", 404),
        ("/health%00", 404),
        ("http://elsewhere/health", 400),
        ("*", 400),
        ("/health", 200),
    ],
)
def test_paths(path: str, status: int) -> None:
    from urllib.parse import unquote

    wire = Wire(method="GET", path=unquote(path), raw_path=path.encode())
    wire.scope["headers"] = [(b"host", b"server")]
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.status == status


@pytest.mark.parametrize("host", ["x/?", "", "a b", "evil@server", "[::1", "a:b", "é", "a:123456", "-x"])
def test_odd_hosts(host: str) -> None:
    refused(ask(an_app(), "GET", "/health", headers={"host": host.encode()}), 400)


@pytest.mark.parametrize("host", ["server", "server:8000", "127.0.0.1:80", "[::1]:8000", "a-b.c_d.example"])
def test_ordinary_hosts(host: str) -> None:
    assert ask(an_app(), "GET", "/health", headers={"host": host}).status_code == 200


def test_a_name_that_leads_here_is_not_enough() -> None:
    app = an_app(allowed_hosts=())
    assert ask(app, "GET", "/health", headers={"host": "localhost:8000"}).status_code == 200
    assert "allowed_hosts" in refused(ask(app, "GET", "/health", headers={"host": "evil.example:8000"}), 400)


def test_two_hosts() -> None:
    refused(ask(an_app(), "GET", "/health", headers=[("host", "a"), ("host", "b")]), 400)


def test_headers_have_limits() -> None:
    refused(ask(an_app(), "GET", "/health", headers={"x": "y" * 65536}), 431)
    refused(ask(an_app(), "GET", "/health", headers=[(f"x{i}", "") for i in range(200)]), 431)
    refused(ask(an_app(), "GET", "/health?" + "q" * 20_000), 414)


def test_a_get_has_no_body() -> None:
    refused(ask(an_app(), "GET", "/health", content=b"{}"), 400)


def test_requests_a_minute() -> None:
    now = 1000.0
    rates = Rates(_no_app, Live(Settings(requests_per_minute_per_key=2)), clock=lambda: now)
    caller = rates._caller("a")
    rates._check(caller)
    now += 20.5
    rates._check(caller)
    with pytest.raises(Refusal, match="2 requests a minute") as caught:
        rates._check(caller)
    assert caught.value.headers == {"Retry-After": "40"}
    rates._check(rates._caller("b"))
    now += 39.5
    rates._check(caller)
    with pytest.raises(Refusal):
        rates._check(caller)


async def _no_app(*args: Any) -> None: ...


def test_too_many_requests_say_when_to_come_again() -> None:
    app = an_app(requests_per_minute_per_key=2, api_keys=(KEY, "sk-other"))
    mine, other = ({"authorization": f"Bearer {key}"} for key in (KEY, "sk-other"))
    for _ in range(2):
        assert ask(app, json={}, headers=mine).status_code == 200
    response = ask(app, json={}, headers=mine)
    refused(response, 429)
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert ask(app, json={}, headers=other).status_code == 200
    assert ask(app, "GET", "/v1/models", headers=mine).status_code == 200


def test_requests_at_once() -> None:
    app = an_app(max_concurrency_per_key=1)

    async def scenario() -> None:
        inside, leave = asyncio.Event(), asyncio.Event()

        @app.post("/v1/slow")
        async def slow() -> dict[str, bool]:
            inside.set()
            await leave.wait()
            return {"fine": True}

        first = asyncio.create_task(call(app, "POST", "/v1/slow", json={}))
        await inside.wait()
        second = await call(app, "POST", "/v1/echo", json={})
        refused(second, 429)
        assert second.headers["retry-after"] == "1"
        leave.set()
        assert (await first).status_code == 200
        assert (await call(app, "POST", "/v1/echo", json={})).status_code == 200

    aio(scenario())


def test_quiet_callers_are_forgotten() -> None:
    now = 0.0
    rates = Rates(_no_app, Live(Settings(requests_per_minute_per_key=2)), clock=lambda: now)
    for i in range(MOST_CALLERS):
        rates._check(rates._caller(str(i)))
    now += 61
    rates._caller("0").running = 1
    rates._caller("one more")
    assert set(rates.callers) == {"0", "one more"}


def test_cors_is_off_by_default() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask(an_app(), "OPTIONS", "/v1/echo", headers=preflight).headers
    app = an_app(cors_origins=("https://a.example",), api_keys=(KEY,))
    response = ask(app, "OPTIONS", "/v1/echo", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = ask(app, json={}, headers={"origin": "https://a.example"})
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    refused(response, 401)
    assert "access-control-allow-origin" not in ask(app, json={}, headers={"origin": "https://b.example"}).headers


@pytest.mark.parametrize(
    ("given", "kept"),
    [(["abc-1.2:3"], True), (["x" * 128], True), (["x" * 129], False), (["a\tb"], False), (["a", "a"], False)],
)
def test_request_ids(given: list[str], kept: bool) -> None:
    response = ask(an_app(), json={}, headers=[("x-request-id", value) for value in given])
    assert response.json()["id"] == response.headers["x-request-id"]
    assert (response.headers["x-request-id"] == given[0]) == kept


def test_what_nobody_foresaw_is_not_told() -> None:
    response = ask(an_app(), "GET", "/v1/boom")
    assert "secret" not in response.text
    refused(response, 500)


def test_websockets_are_closed() -> None:
    wire = Wire(type="websocket")
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.sent == [{"type": "websocket.close", "code": 1000}]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    names = ("paceline", "uvicorn")
    before = [(logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names]
    logs.start_log(as_json=True, stream=stream)
    yield stream
    for name, (handlers, level) in zip(names, before, strict=True):
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).setLevel(level)


def test_the_log_has_a_line_for_each_request(log: io.StringIO) -> None:
    ask(an_app(), json={"prompt": "my secret"}, headers={"x-request-id": "abc"}, params={"key": "hidden"})
    ask(an_app(), "GET", "/v1/boom")
    first, failure, second = [json.loads(line) for line in log.getvalue().splitlines()]
    assert first["event"] == "request"
    assert (first["request_id"], first["method"], first["path"], first["status"]) == ("abc", "POST", "/v1/echo", 200)
    assert first["seconds"] > 0
    assert "RuntimeError" in failure["traceback"]
    assert (second["status"], second["level"]) == (500, "warning")
    assert "secret" not in json.dumps([first, second])
    assert "hidden" not in log.getvalue()


def test_a_client_cannot_forge_lines_of_the_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", None, None)
    record.facts = {"path": "/a\n12:00:00 request", "status": 200}
    line = logs.Readable().format(record)
    assert line.count("\n") == 0
    assert line.endswith('request path="/a\\n12:00:00 request" status=200')
