"""/v1/models: the one model that is served."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline.server.dialects import ERRORS
from paceline.server.protocol.answers import ModelCard, ModelList
from paceline.server.routes.common import bridge_of, translator_of

router = APIRouter(tags=["OpenAI"], responses=ERRORS)


@router.get("/v1/models", summary="What is served")
async def models(http: Request) -> ModelList:
    return ModelList(data=[_card(http)])


@router.get("/v1/models/{model:path}", summary="One of them")
async def model(model: str, http: Request) -> ModelCard:
    translator_of(http).check_model(model)
    return _card(http)


def _card(http: Request) -> ModelCard:
    translator = translator_of(http)
    return ModelCard(id=bridge_of(http).model, created=http.app.state.started, max_model_len=translator.max_context)
