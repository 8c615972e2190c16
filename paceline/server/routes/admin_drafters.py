"""/admin/drafters: drafters and the canary of a running server, for callers with the admin key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from paceline.errors import InvalidRequest, UnknownOption
from paceline.server.canary.conductor import Canary
from paceline.server.canary.options import CanaryOptions
from paceline.server.canary.trial import Phase
from paceline.server.dialects import ERRORS
from paceline.server.served_drafters import ServedDrafters

router = APIRouter(tags=["control"], responses=ERRORS)
Given = Annotated[dict[str, Any], Body()]


def _drafters(http: Request) -> ServedDrafters:
    drafters: ServedDrafters = http.app.state.drafters
    return drafters


def _canary(http: Request) -> Canary:
    canary: Canary = http.app.state.canary
    return canary


@router.get("/admin/drafters", summary="Drafters, default and canary")
async def listed(http: Request) -> dict[str, Any]:
    drafters, canary = _drafters(http), _canary(http)
    return {
        "default": drafters.default,
        "drafters": drafters.listed(),
        "canary": canary.described(),
        "past": [trial.describe() for trial in canary.past],
        "state_dir": str(drafters.store.folder),
    }


@router.post("/admin/drafters", summary="Load a drafter, under a name of its own")
async def load(http: Request, body: Given) -> dict[str, Any]:
    given = _texts(body, needed=("drafter",), others=("name",))
    await _drafters(http).add(given["drafter"], given.get("name"))
    return await listed(http)


@router.delete("/admin/drafters/{name}", summary="Unload a drafter; its requests go on")
async def unload(http: Request, name: str) -> dict[str, Any]:
    _canary(http).check_free(name)
    await _drafters(http).remove(name)
    return await listed(http)


@router.post("/admin/drafters/default", summary="Choose the drafter of requests that name none")
async def choose(http: Request, body: Given) -> dict[str, Any]:
    given = _texts(body, needed=("drafter",))
    _canary(http).check_free(_drafters(http).default)
    await _drafters(http).choose(given["drafter"])
    return await listed(http)


@router.post("/admin/drafters/canary", summary="Try a drafter on a share of the requests")
async def start(http: Request, body: Given) -> dict[str, Any]:
    await _canary(http).start(CanaryOptions.read(body))
    return await listed(http)


@router.post("/admin/drafters/canary/promote", summary="Make the canary the default")
async def promote(http: Request) -> dict[str, Any]:
    await _canary(http).end(Phase.PROMOTED, "by the operator")
    return await listed(http)


@router.post("/admin/drafters/canary/rollback", summary="Take the canary back")
async def roll_back(http: Request) -> dict[str, Any]:
    await _canary(http).end(Phase.ROLLED_BACK, "by the operator")
    return await listed(http)


def _texts(body: Mapping[str, Any], *, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, str]:
    """Check the fields of a body, which are all texts."""
    for name, value in body.items():
        if name not in (*needed, *others):
            raise UnknownOption("field", name, (*needed, *others), param=name)
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must be a text, not {value!r}", param=name)
    for name in needed:
        if name not in body:
            raise InvalidRequest(f"{name} is missing", param=name)
    return dict(body)
