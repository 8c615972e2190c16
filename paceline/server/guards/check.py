"""The common parts of the guards: a refusal and how it is answered, and a check of a request's path and headers."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.live import CurrentSettings
from paceline.server.problems import error_response
from paceline.server.settings import Settings

BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # methods of requests without a body
PARSED = "paceline.parsed_body"  # key of a scope: the body as a value
LINGER_SECONDS = 2.0  # longest time in which an unwanted body is read and dropped


class Refusal(Exception):
    """The reason why a guard does not let a request through."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, unread: bool) -> None:
        """Send the error body. `unread`: the client is still sending a body, which is dropped."""
        headers = self.headers | ({"Connection": "close"} if unread else {})
        response = error_response(self.status, self.message, path=scope["path"], code=self.code, headers=headers)
        await send({"type": "http.response.start", "status": self.status, "headers": response.raw_headers})
        content = b"" if scope["method"] == "HEAD" else bytes(response.body)
        await send({"type": "http.response.body", "body": content, "more_body": unread})
        if unread:
            await _drop_body(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass


class Check:
    """Middleware that decides by method, path and headers, before the body: `check` raises Refusal, or returns."""

    def __init__(self, app: ASGIApp, live: CurrentSettings) -> None:
        self.app, self.live = app, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope, self.live.settings)
            except Refusal as refusal:
                await refusal.answer(scope, receive, send, unread=has_body(scope))
                return
        await self.app(scope, receive, send)

    def check(self, scope: Scope, settings: Settings) -> None: ...


def values(scope: Scope, name: bytes) -> list[bytes]:
    """List the values of all headers with this name."""
    return [value for key, value in scope["headers"] if key == name]


def has_body(scope: Scope) -> bool:
    """True if the headers announce a body that is not empty."""
    lengths = values(scope, b"content-length")
    return bool(values(scope, b"transfer-encoding")) or any(length.strip(b"0 ") for length in lengths)
