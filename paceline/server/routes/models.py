"""/v1/models: the one model that is served."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline.server.answers.timestamps import timestamp
from paceline.server.dialects import ERRORS
from paceline.server.protocol.answers import ModelCard, ModelList
from paceline.server.routes.common import bridge_of, translator_of

router = APIRouter(tags=["OpenAI"], responses=ERRORS)


@router.get("/v1/models", summary="What is served")
async def models(http: Request) -> ModelList:
    name = bridge_of(http).model
    return ModelList(data=[_card(http)], first_id=name, last_id=name)


@router.get("/v1/models/{model:path}", summary="One of them")
async def model(model: str, http: Request) -> ModelCard:
    translator_of(http).check_model(model)
    return _card(http)


def _card(http: Request) -> ModelCard:
    name, began, context = bridge_of(http).model, http.app.state.started, translator_of(http).max_context
    return ModelCard(
        id=name,
        created=began,
        max_model_len=context,
        display_name=name,
        created_at=timestamp(began),
        max_input_tokens=context,
    )
