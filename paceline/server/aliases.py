"""Paths of OpenAI's API without /v1: clients of llama.cpp's server may leave it out."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
ALIASES = frozenset({"/chat/completions", "/completions", "/embeddings", "/models", "/responses"})


class Aliases:
    """Middleware around the guards: they, the log and the routes see the path with /v1."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ALIASES:
            scope = {**scope, "path": VERSION + scope["path"]}
        await self.app(scope, receive, send)
