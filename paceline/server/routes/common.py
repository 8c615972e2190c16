"""Helpers of the routes: access to the server's parts, and the documentation of an endpoint.

Guards have checked before a route runs that its body is valid JSON, without NaN and without half characters.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

from paceline.server.bridge import Bridge
from paceline.server.live import CurrentSettings
from paceline.server.problems import ERRORS
from paceline.server.settings import Settings
from paceline.server.translate.translator import Translator


def bridge_of(http: Request) -> Bridge:
    bridge: Bridge = http.app.state.bridge
    return bridge


def translator_of(http: Request) -> Translator:
    bridge = bridge_of(http)
    return Translator(llm=bridge.llm, model=bridge.model, settings=settings_of(http))


def live_of(http: Request) -> CurrentSettings:
    live: CurrentSettings = http.app.state.live
    return live


def settings_of(http: Request) -> Settings:
    """Return the settings of this moment: limits may be reloaded."""
    return live_of(http).settings


def streams(model: type[Any], what: str) -> dict[int | str, dict[str, Any]]:
    """Document an endpoint that answers with `model`, or with events when asked to stream."""
    about = f"The whole answer; with `stream`, {what}"
    return {200: {"model": model, "description": about, "content": {"text/event-stream": {}}}, **ERRORS}
