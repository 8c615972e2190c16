"""/api/tags, /api/show, /api/ps and /api/version: the served model in Ollama's words."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from fastapi import APIRouter, Request

from paceline import __version__
from paceline.llm import LLM
from paceline.server.answers.timestamps import timestamp
from paceline.server.dialects import OLLAMA
from paceline.server.protocol.ollama import (
    ListedModel,
    ListedModels,
    ModelDetails,
    OllamaVersion,
    RunningModel,
    RunningModels,
    ShownModel,
    ShowRequest,
)
from paceline.server.routes.common import ParsedRoute, bridge_of, translator_of
from paceline.server.routes.models import model_facts
from paceline.server.translate.ollama import bare_name, tagged_name
from paceline.types import SamplingParams

router = APIRouter(route_class=ParsedRoute, tags=["Ollama"], responses=OLLAMA.errors)

OLLAMA_VERSION = "0.12.11"  # the release of Ollama whose API this follows; clients look for a least version
NEVER = "2999-12-31T00:00:00Z"  # when the model is unloaded
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # our names of formats → Ollama's
FILLS_IN = "{# fills in the middle: .Prompt, .Suffix #}"  # Continue looks for .Suffix in a template
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))  # of parameters


@router.get("/api/version", summary="The API's version")
async def version() -> OllamaVersion:
    return OllamaVersion(version=OLLAMA_VERSION, paceline=__version__)


@router.get("/api/tags", summary="What is served")
async def tags(http: Request) -> ListedModels:
    return ListedModels(models=[_listed(http)])


@router.get("/api/ps", summary="What is loaded")
async def ps(http: Request) -> RunningModels:
    listed, target = _listed(http), bridge_of(http).llm.parts.target
    on_gpu = 0 if target.device == "cpu" else listed.size
    context = translator_of(http).max_context
    return RunningModels(
        models=[RunningModel(**dict(listed), expires_at=NEVER, size_vram=on_gpu, context_length=context)]
    )


@router.post("/api/show", summary="The model's facts")
async def show(body: ShowRequest, http: Request) -> ShownModel:
    bridge, translator = bridge_of(http), translator_of(http)
    translator.check_model(bare_name(body.model or body.name))
    return ShownModel(
        modelfile=f"FROM {tagged_name(bridge.model)}",
        parameters=default_parameters(bridge.llm.default_sampling, translator.max_context),
        template=_template(bridge.llm),
        details=_details(bridge.llm),
        model_info=_info(bridge.llm, bridge.model, translator.max_context),
        capabilities=_capabilities(bridge.llm),
        modified_at=timestamp(http.app.state.started),
    )


def _listed(http: Request) -> ListedModel:
    bridge = bridge_of(http)
    name, details = tagged_name(bridge.model), _details(bridge.llm)
    size = model_facts(bridge.llm).size
    digest = hashlib.sha256(f"{name} {size} {details}".encode()).hexdigest()
    modified = timestamp(http.app.state.started)
    return ListedModel(name=name, model=name, modified_at=modified, size=size, digest=digest, details=details)


def _details(llm: LLM) -> ModelDetails:
    target = llm.parts.target
    main, family = target.parts[0].format, target.model.config.architecture
    return ModelDetails(
        format="gguf" if target.model.path.suffix == ".gguf" else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short(model_facts(llm).n_params),
        quantization_level=TYPES.get(main, main.partition(",")[0]),
    )


def _info(llm: LLM, name: str, context: int) -> dict[str, object]:
    config = llm.parts.target.model.config
    family = config.architecture
    return {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": model_facts(llm).n_params,
        f"{family}.context_length": context,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_layers,
        f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads,
        f"{family}.vocab_size": config.vocab_size,
    }


def default_parameters(sampling: SamplingParams, context: int) -> str:
    """List the defaults that requests get: the context, and what the model's authors advise."""
    usual = SamplingParams()
    names = {field.name: field.name for field in fields(sampling)} | {"repetition_penalty": "repeat_penalty"}
    advised = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(usual, name)}
    numbers = {names[name]: value for name, value in advised.items() if isinstance(value, int | float)}
    return "\n".join(f"{name:<30} {value}" for name, value in ({"num_ctx": context} | numbers).items())


def _template(llm: LLM) -> str:
    template = llm.tokenizer.chat_template or "{{ .Prompt }}"
    return template if llm.tokenizer.fim is None else template + FILLS_IN


def _capabilities(llm: LLM) -> list[str]:
    """List what the model can do, in Ollama's words. Tools are spelt out for templates that know none."""
    able = {"tools": llm.tokenizer.chat_template is not None, "insert": llm.tokenizer.fim is not None}
    return ["completion", *(name for name, can in able.items() if can)]


def _short(count: int) -> str:
    """Write a number of parameters as people do: 135M, 1.5B."""
    size, unit = next(((size, unit) for size, unit in UNITS if count >= size), (1, ""))
    return f"{count / size:.3g}{unit}"
