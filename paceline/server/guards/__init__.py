"""Middleware that a request passes before it reaches a route, from the outside in:

    Trace     gives the request an id, writes its line in the log, and lets no exception out
    Headers   checks that path, host and headers are what a client would send
    CORS      answers for browsers, only where origins are allowed
    Keys      finds out who calls
    Rates     limits how often and how many at once a caller may ask
    Bodies    reads the body: complete, within its size, and JSON that every parser reads alike

Guards are plain ASGI and buffer no response. A guard that refuses a request answers it itself with an error body, in
under a second once it knows the reason. If the client is still sending a body, the guard reads and drops it for two
seconds at most, so that the client can read the answer. Then the connection is closed.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.server.guards.bodies import Bodies
from paceline.server.guards.headers import Headers
from paceline.server.guards.keys import Keys
from paceline.server.guards.rates import Rates
from paceline.server.guards.trace import Trace
from paceline.server.live import CurrentSettings
from paceline.server.traces import Tracer


def install_guards(app: FastAPI, live: CurrentSettings, *, tracer: Tracer | None = None) -> None:
    """Put the guards around an app. Each call of `add_middleware` wraps the earlier ones."""
    app.add_middleware(Bodies, live=live)
    app.add_middleware(Rates, live=live)
    app.add_middleware(Keys, live=live)
    if live.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=live.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # those that are asked for: clients have their own, such as x-stainless-lang
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Headers, live=live)
    app.add_middleware(Trace, live=live, tracer=tracer)
