"""Helpers of the routes: access to the server's parts, and the documentation of an endpoint.

Guards have checked before a route runs that its body is valid JSON, without NaN and without half characters.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from paceline.server.bridge import Bridge
from paceline.server.dialects import OPENAI, Dialect
from paceline.server.guards.check import PARSED
from paceline.server.live import CurrentSettings
from paceline.server.settings import Settings
from paceline.server.sse import EVENTS
from paceline.server.translate.translator import Translator


class ParsedRequest(Request):
    """A request whose body a guard has parsed: parsing it again would hold up the event loop."""

    async def body(self) -> bytes:
        return b"{}" if PARSED in self.scope else await super().body()  # FastAPI looks only whether there is one

    async def json(self) -> Any:
        return self.scope[PARSED] if PARSED in self.scope else await super().json()


class ParsedRoute(APIRoute):
    """A route for bodies that may be long."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return parsed


def bridge_of(http: Request) -> Bridge:
    bridge: Bridge = http.app.state.bridge
    return bridge


def translator_of(http: Request) -> Translator:
    bridge = bridge_of(http)
    tenant = http.scope["tenant"]  # the guard of keys has set it
    return Translator(llm=bridge.llm, model=bridge.model, settings=settings_of(http), tenant=tenant)


def live_of(http: Request) -> CurrentSettings:
    live: CurrentSettings = http.app.state.live
    return live


def settings_of(http: Request) -> Settings:
    """Return the settings of this moment: limits may be reloaded."""
    return live_of(http).settings


def streams(
    model: type[Any], what: str, *, content_type: str = EVENTS, dialect: Dialect = OPENAI
) -> dict[int | str, dict[str, Any]]:
    """Document an endpoint that answers with `model`, or with a stream of this type when asked to."""
    about = f"The whole answer; with `stream`, {what}"
    return {200: {"model": model, "description": about, "content": {content_type: {}}}, **dialect.errors}
