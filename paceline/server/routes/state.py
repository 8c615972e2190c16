"""The state of the server: /health, /ready, /version, /v1/speculation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from paceline import __version__
from paceline.server.bridge import Bridge
from paceline.server.dialects import ERRORS
from paceline.server.measured import measured_fields
from paceline.server.protocol.answers import CanaryState, DraftPrices, GroupSpeedup, Health, MeasuredSpeedup, Version
from paceline.server.routes.common import bridge_of, settings_of

router = APIRouter(tags=["State"], responses=ERRORS)
DOWN: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now"}}


class Speculating(BaseModel):
    """Whether speculation runs, by whom, and why not where it does not."""

    model: str
    default_drafter: str | None
    drafters: dict[str, str | None] = Field(description="why a drafter is out of use; null: it is in use")
    how: dict[str, str] = Field(description="how each drafter drafts, and what it has in common with the target")
    rules: list[str]
    max_draft: int = Field(description="longest draft that a request may ask for")
    bitwise: bool = Field(description="the arithmetic of a row never depends on its neighbours")
    running: int
    waiting: int
    pages_held: int
    pages_total: int
    off_now: dict[str, int] = Field(description="why running sequences do not draft now, and how many")
    off_reasons: dict[str, int] = Field(description="why ended answers did not draft to the last, and how many")
    output_tokens: int = Field(description="since the start")
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_by_position: list[float] = Field(description="share of drafts that were right up to position 0, 1, …")
    speedup: MeasuredSpeedup | None = Field(description="of all drafters and batch sizes by their time; null: see note")
    speedup_note: str | None = Field(description="why there is no measured speed-up")
    speedups: list[GroupSpeedup] = Field(description="by drafter and batch size")
    drawn_steps: int = Field(description="steps that were drawn to run plain, to measure the speed-up")
    drawn_share: float = Field(description="of the steps with a drafter")
    drafting_now: dict[str, int] = Field(description="drafters, and running sequences that draft with them now")
    prices: dict[str, DraftPrices] = Field(description="by drafter")
    answers_by_drafter: dict[str, int]
    canary: CanaryState | None = Field(description="the canary that runs; null: none does")
    canaries: list[CanaryState] = Field(description="canaries that were promoted or rolled back, the latest last")
    engine: dict[str, float] = Field(description="totals since the start; times in seconds")


@router.get(
    "/health",
    responses=DOWN,
    response_model_exclude_none=True,
    summary="200 as long as requests are served, or will be",
)
async def health(http: Request, response: Response) -> Health:
    health = _health(bridge_of(http))
    response.status_code = 503 if health.status in ("draining", "dead") else 200
    return health


@router.get("/ready", responses=DOWN, response_model_exclude_none=True, summary="200 when requests are served now")
async def ready(http: Request, response: Response) -> Health:
    bridge = bridge_of(http)
    if bridge.state == "starting":
        response.headers["Retry-After"] = str(bridge.loading.retry_after)
    response.status_code = 200 if bridge.state == "ready" else 503
    return _health(bridge)


def _health(bridge: Bridge) -> Health:
    if bridge.state != "starting":
        return Health(status=bridge.state)
    return Health(status=bridge.state, percent=bridge.loading.percent, doing=bridge.loading.doing)


@router.get("/version")
async def version() -> Version:
    return Version(version=__version__)


@router.get("/v1/speculation", summary="Speculation now, and the reasons where it is off", tags=["Speculation"])
async def speculation(http: Request) -> Speculating:
    bridge, settings = bridge_of(http), settings_of(http)
    now, engine, canary = bridge.stats(), bridge.llm.engine, http.app.state.canary
    return Speculating(
        model=bridge.model,
        default_drafter=engine.default_drafter,
        drafters=dict(now.drafters),
        how={name: made.how for name, made in bridge.llm.parts.drafters.items()},
        rules=list(settings.allowed_rules),
        max_draft=min(engine.max_draft, settings.allowed_max_draft or engine.max_draft),
        bitwise=bridge.llm.parts.bitwise,
        running=now.running,
        waiting=now.waiting,
        pages_held=now.pages_held,
        pages_total=now.pages_total,
        off_now=dict(now.off_reasons),
        drafting_now=dict(now.drafting),
        prices={name: DraftPrices(**asdict(prices)) for name, prices in now.prices.items()},
        output_tokens=now.engine.output_tokens,
        engine=asdict(now.engine),
        canary=canary.described(),
        canaries=[trial.describe() for trial in canary.past],
        **measured_fields(now),
        **http.app.state.metrics.speculation(),
    )
