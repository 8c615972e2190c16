"""/admin/tenants: who is served how much, for callers with the admin key. Others would see what is not theirs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from paceline.server.dialects import ERRORS
from paceline.server.routes.common import bridge_of

router = APIRouter(tags=["control"], responses=ERRORS)


@router.get("/admin/tenants", summary="Requests and tokens by tenant: digests of API keys")
async def tenants(http: Request) -> dict[str, Any]:
    bridge = bridge_of(http)
    return bridge.tenants.described(bridge.stats().tenants)
