"""The ASGI app: routes, errors, metrics, playground and guards around one bridge."""

from __future__ import annotations

import time

from fastapi import FastAPI

from paceline import __version__
from paceline.server.aliases import Aliases
from paceline.server.bridge import Bridge
from paceline.server.canary.conductor import Canary
from paceline.server.canary.store import Store, state_folder
from paceline.server.guards import install_guards
from paceline.server.live import CurrentSettings
from paceline.server.metrics import install_metrics
from paceline.server.playground import install_playground
from paceline.server.problems import install_problems
from paceline.server.routes import (
    admin,
    admin_drafters,
    admin_tenants,
    anthropic,
    chat,
    completions,
    desktop,
    embeddings,
    infill,
    models,
    ollama,
    ollama_models,
    responses,
    state,
    tokens,
)
from paceline.server.served_drafters import ServedDrafters
from paceline.server.settings import Settings
from paceline.server.traces import Tracer

ABOUT = (
    "Exact speculative decoding. Requests and answers are OpenAI's, Anthropic's and Ollama's, with fields that say "
    "what speculation did."
)

PARTS = (
    chat,
    completions,
    infill,
    responses,
    embeddings,
    anthropic,
    ollama,
    ollama_models,
    models,
    tokens,
    desktop,
    state,
    admin,
    admin_drafters,
    admin_tenants,
)


def create_app(bridge: Bridge, settings: Settings, *, tracer: Tracer | None = None) -> FastAPI:
    """Make the app. The caller starts and closes the bridge.

    `app.state.live.settings` are the settings in force: some may change while the app runs."""
    app = FastAPI(title="Paceline", version=__version__, description=ABOUT, docs_url=None, redoc_url=None)
    app.state.bridge = bridge
    app.state.live = CurrentSettings(settings)
    app.state.started = int(time.time())
    app.state.drafters = ServedDrafters(bridge, Store(state_folder(settings.state_dir, bridge.model)))
    app.state.canary = Canary(bridge, app.state.drafters)
    install_problems(app)
    for part in PARTS:
        app.include_router(part.router)
    install_metrics(app, bridge).canary = app.state.canary
    install_playground(app)
    install_guards(app, app.state.live, tracer=tracer)
    app.add_middleware(Aliases)
    return app
