"""What a body must be, how long it may take, and what becomes of one that nobody wants."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fastapi import Request
from starlette.responses import StreamingResponse

from paceline.server.guards import check
from paceline.server.guards import json as json_guard
from paceline.server.guards.check import Refusal
from paceline.server.guards.json import check_json
from tests.server.guarded import JSON, KEY, RawRequest, aio, an_app, ask, refused, send


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
    check_json(content, max_depth=64, max_values=1 << 18)


def test_json_that_costs_much_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_guard.json, "loads", lambda *args, **options: pytest.fail("it was"))
    with pytest.raises(Refusal, match="1000002 lists and objects"):
        check_json(b"[" + b"[]," * 1_000_000 + b"{}]", max_depth=64, max_values=1 << 18)
    with pytest.raises(Refusal, match="deeper"):
        check_json(b"[" * 4_000_000, max_depth=64, max_values=1 << 18)


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


def test_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LINGER_SECONDS", 0.01)
    wire = RawRequest({"type": "http.request", "body": b"{", "more_body": True})
    aio(an_app(read_timeout=0.01)(wire.scope, wire.receive, wire.send))
    assert wire.status == 408
    assert (b"connection", b"close") in wire.sent[0]["headers"]
    assert not wire.sent[-1]["more_body"]


def test_an_unwanted_body_is_dropped_after_the_answer() -> None:
    part = {"type": "http.request", "body": b"x" * 100, "more_body": True}
    wire = RawRequest(*[part] * 5, {"type": "http.request", "body": b""}, path="/v1/echo")
    aio(an_app(api_keys=(KEY,))(wire.scope, wire.receive, wire.send))
    assert wire.status == 401
    assert not wire.messages


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    wire = RawRequest({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    aio(an_app()(wire.scope, wire.receive, wire.send))
    assert wire.sent == []


def test_a_route_learns_that_its_client_left() -> None:
    app, left = an_app(), []

    @app.post("/v1/wait")
    async def wait(request: Request) -> None:
        await request.body()
        left.append((await request.receive())["type"])

    body = {"type": "http.request", "body": b"{}", "more_body": False}
    wire = RawRequest(body, {"type": "http.disconnect"}, path="/v1/wait")
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

    wire = RawRequest({"type": "http.request", "body": b"{}", "more_body": False}, path="/v1/stream")
    aio(app(wire.scope, wire.receive, wire.send))
    assert seen == [[], [b"0"], [b"0", b"1"]]


def test_a_get_has_no_body() -> None:
    refused(ask(an_app(), "GET", "/health", content=b"{}"), 400)
