"""A small app behind the guards, and ways to knock: by a client, or message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI, Request

from paceline.server.guards import install_guards
from paceline.server.live import CurrentSettings
from paceline.server.problems import install_problems
from paceline.server.routes import admin
from paceline.server.settings import Settings

T = TypeVar("T")
KEY, ADMIN = "sk-right", "sk-admin"
JSON = {"content-type": "application/json"}


def aio(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=200))


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

    app.state.live = CurrentSettings(Settings.of(**{"allowed_hosts": ("*",)} | options))
    app.include_router(admin.router)
    install_guards(app, app.state.live)
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


class RawRequest:
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

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
