"""Who is let through: keys, hosts, paths, headers; and what is written down of it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from paceline.errors import InvalidRequest
from paceline.server import logs
from paceline.server.live import CurrentSettings
from paceline.server.settings import Settings
from tests.server.guarded import ADMIN, JSON, KEY, RawRequest, aio, an_app, ask, refused


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
    live: CurrentSettings = app.state.live
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

    live = CurrentSettings(Settings())
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

    wire = RawRequest(method="GET", path=unquote(path), raw_path=path.encode())
    wire.scope["headers"] = [(b"host", b"server")]
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.status == status
    assert (b"taken literally" in wire.body) == (status == 404), "no route had a look at it"


def test_an_answer_to_head_has_no_body() -> None:
    wire = RawRequest(method="HEAD", path="/v1/models")
    wire.scope["headers"] = [(b"host", b"server")]
    aio(an_app(api_keys=(KEY,))(wire.scope, wire.receive, wire.send))
    assert (wire.status, wire.body) == (401, b"")


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
    refused(ask(an_app(), "GET", "/health", headers=[(f"x{i}", "y" * 1000) for i in range(20)]), 431)
    refused(ask(an_app(), "GET", "/health", headers=[(f"x{i}", "") for i in range(200)]), 431)
    refused(ask(an_app(), "GET", "/health?" + "q" * 20_000), 414)


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


def test_cors_lets_through_the_headers_that_are_asked_for() -> None:
    """Clients have their own: openai x-stainless-…, anthropic x-api-key and others. Other origins get no answer."""
    app = an_app(cors_origins=("https://a.example",), api_keys=(KEY,))
    names = "anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,x-api-key"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": f"{names},x-stainless-lang"}
    response = ask(app, "OPTIONS", "/v1/echo", headers={"origin": "https://a.example", **asked})
    assert response.status_code == 200
    assert {*names.split(","), "x-stainless-lang"} <= {*response.headers["access-control-allow-headers"].split(",")}
    other = ask(app, "OPTIONS", "/v1/echo", headers={"origin": "https://b.example", **asked})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


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


def test_what_fails_in_the_middle_of_an_answer_does_not_begin_another() -> None:
    app = an_app()

    @app.post("/v1/half")
    async def half() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            raise RuntimeError("/secret/path")

        return StreamingResponse(parts())

    wire = RawRequest({"type": "http.request", "body": b"{}", "more_body": False}, path="/v1/half")
    aio(app(wire.scope, wire.receive, wire.send))
    assert [message["status"] for message in wire.sent if "status" in message] == [200]
    assert wire.body == b"one"


def test_websockets_are_closed() -> None:
    wire = RawRequest(type="websocket")
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.sent == [{"type": "websocket.close", "code": 1000}]


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
