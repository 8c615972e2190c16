"""Bodies of the routes that desktop clients read: llama.cpp's /props and /slots, LM Studio's /api/v0/models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Slot(BaseModel):
    """A place in the batch. What runs in it is not told."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Props(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str = Field(description="the served name: where the file lies is not told")
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    n_ctx: int
    modalities: dict[str, bool] = {"vision": False, "audio": False}
    is_sleeping: bool = False


class LmStudioModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    type: Literal["llm"] = "llm"
    publisher: str = "paceline"
    arch: str
    compatibility_type: Literal["gguf", "safetensors"]
    quantization: str
    state: Literal["loaded"] = "loaded"
    max_context_length: int
    loaded_context_length: int


class LmStudioModels(BaseModel):
    object: Literal["list"] = "list"
    data: list[LmStudioModel]
