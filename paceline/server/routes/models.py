"""/v1/models: the one model that is served."""

from __future__ import annotations

import torch
from fastapi import APIRouter, Request

from paceline.llm import LLM
from paceline.server.answers.timestamps import timestamp
from paceline.server.dialects import ERRORS
from paceline.server.protocol.answers import ModelCard, ModelFacts, ModelList
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
    bridge, began, context = bridge_of(http), http.app.state.started, translator_of(http).max_context
    return ModelCard(
        id=bridge.model,
        created=began,
        max_model_len=context,
        display_name=bridge.model,
        created_at=timestamp(began),
        max_input_tokens=context,
        meta=model_facts(bridge.llm),
    )


def model_facts(llm: LLM) -> ModelFacts:
    target, config = llm.parts.target, llm.parts.target.model.config
    parameters, size = sum(part.parameters for part in target.parts), sum(part.bytes for part in target.parts)
    advice = llm.default_sampling
    return ModelFacts(
        n_params=parameters,
        size=size,
        n_ctx_train=config.max_context,
        n_vocab=config.vocab_size,
        n_embd=config.hidden_size,
        architecture=config.architecture,
        bits_per_weight=round(8 * size / max(parameters, 1), 2),
        formats={part.format: part.bytes for part in target.parts},
        device=target.device,
        device_name=torch.cuda.get_device_name(target.decoder.device) if target.decoder else "CPU",
        kernels=target.why,
        drafters={name: made.how for name, made in llm.parts.drafters.items()},
        default_sampling={"temperature": advice.temperature, "top_p": advice.top_p, "top_k": advice.top_k},
    )
