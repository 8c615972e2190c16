"""Plans and services for tests: real shapes, and replicas whose steps take round numbers of seconds."""

from __future__ import annotations

from typing import Any

from paceline.plan.fleet import Plan, Question, make_plan
from paceline.plan.gpus import GPUS, H200
from paceline.plan.service import PROMPT_GRAIN, Service

H200_MEMORY = H200.memory


def question(model: str = "llama-3.1-8b", *, gpu: str = "h200", **more: Any) -> Question:
    return Question(model=model, gpu=GPUS[gpu], **more)


def plan(model: str = "llama-3.1-8b", *, gpu: str = "h200", **more: Any) -> Plan:
    return make_plan(question(model, gpu=gpu, **more))


def service(
    *, step: float = 0.01, most: int = 4, tokens: float = 1.0, prompt_token: float = 0.001, kv_tokens: int = 10_000
) -> Service:
    """A replica whose steps take `step` seconds whatever runs, and whose prompts take `prompt_token` for each token."""
    prompts = tuple(prompt_token * PROMPT_GRAIN * grain for grain in range(130))
    return Service(
        steps=(0.0, *[step] * most),
        slopes=(0.0,) * (most + 1),
        tokens=(0.0, *[tokens] * most),
        prompts=prompts,
        attention=0.0,
        rows_alone=8192,
        rows_beside=64,
        kv_tokens=kv_tokens,
    )
