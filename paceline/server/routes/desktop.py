"""State of the server as desktop clients ask for it: llama.cpp's /props and /slots, LM Studio's /api/v0/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from paceline.server.answers.tally import FINGERPRINT
from paceline.server.dialects import ERRORS
from paceline.server.protocol.desktop import LmStudioModel, LmStudioModels, Props, Slot
from paceline.server.routes.common import ParsedRoute, bridge_of, translator_of

router = APIRouter(route_class=ParsedRoute, tags=["Desktop"], responses=ERRORS)


@router.get("/props", summary="The model's defaults, as llama.cpp has them")
async def props(http: Request) -> Props:
    bridge, translator = bridge_of(http), translator_of(http)
    tokenizer = bridge.llm.tokenizer
    return Props(
        default_generation_settings=_slot(http, 0).model_dump() | {"params": _params(http)},
        total_slots=bridge.llm.engine.max_sequences,
        model_alias=bridge.model,
        model_path=bridge.model,
        chat_template=tokenizer.chat_template or "",
        bos_token=tokenizer.token_names.get("bos_token", ""),
        eos_token=tokenizer.token_names.get("eos_token", ""),
        build_info=FINGERPRINT,
        n_ctx=translator.max_context,
    )


@router.get("/slots", summary="Places in the batch, as llama.cpp has them")
async def slots(http: Request) -> list[Slot]:
    return [_slot(http, i) for i in range(bridge_of(http).llm.engine.max_sequences)]


@router.get("/api/v0/models", summary="The served model, as LM Studio has it")
async def lm_studio_models(http: Request) -> LmStudioModels:
    return LmStudioModels(data=[_model(http)])


@router.get("/api/v0/models/{model:path}", summary="One of them")
async def lm_studio_model(model: str, http: Request) -> LmStudioModel:
    translator_of(http).check_model(model)
    return _model(http)


def _slot(http: Request, index: int) -> Slot:
    bridge = bridge_of(http)
    return Slot(
        id=index,
        n_ctx=translator_of(http).max_context,
        speculative=bridge.llm.engine.default_drafter is not None,
        is_processing=index < bridge.stats().running,
    )


def _params(http: Request) -> dict[str, Any]:
    sampling = bridge_of(http).llm.default_sampling
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    return {name: getattr(sampling, name) for name in names} | {
        "repeat_penalty": sampling.repetition_penalty,
        "seed": -1,
        "n_predict": -1,
    }


def _model(http: Request) -> LmStudioModel:
    bridge, target = bridge_of(http), bridge_of(http).llm.parts.target
    return LmStudioModel(
        id=bridge.model,
        arch=target.model.config.architecture,
        compatibility_type="gguf" if target.model.kind == "gguf" else "safetensors",
        quantization=target.parts[0].format if target.parts else "",
        max_context_length=target.model.config.max_context,
        loaded_context_length=translator_of(http).max_context,
    )
