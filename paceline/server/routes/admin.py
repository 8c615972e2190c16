"""/admin: control of a running server, for callers with the admin key (see `guards.keys`)."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline.server.dialects import ERRORS
from paceline.server.routes.common import live_of

router = APIRouter(tags=["control"], responses=ERRORS)


@router.post("/admin/reload")
async def _reload(request: Request) -> dict[str, list[str]]:
    """Read the settings anew and apply those that may change while the server runs."""
    return live_of(request).reload()
