"""Divide the memory of an engine: how many pages of keys and values fit beside weights, passes and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.drafters.recipe import Recipe
from paceline.errors import InvalidRequest, OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.runner.loading.memory import available_memory
from paceline.runner.loading.models import ReadyModel

DEFAULT_KV_MEMORY = 4 << 30  # bytes on a CPU; less if that is over a quarter of the available memory
GRAPH_MEMORY = 2 << 30  # bytes of a GPU left free for graphs, their scratch memory and the driver
GRAPH_SHARE = 0.03  # part of the GPU left free for them if that is more


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV memory of an engine, in pages."""

    page_bytes: int  # bytes of one page, of the target and all drafters together
    num_pages: int
    max_context: int


def share_memory(
    target: ReadyModel, recipes: Sequence[Recipe], config: EngineConfig, *, budget: int | None = None
) -> Memory:
    """Divide the KV memory into pages, but never more than all sequences together could use. `budget`: bytes of it;
    None: as `kv_budget` says."""
    page_bytes = target.page_bytes + sum(made.page_bytes for made in recipes)
    model_context = target.model.config.max_context
    wanted = config.max_context or model_context
    if wanted > model_context:
        raise InvalidRequest(f"max_context {wanted} is more than the {model_context} tokens that {target.name} knows")
    budget = kv_budget(target, recipes, config) if budget is None else budget
    useful = config.max_sequences * -(-(wanted + config.max_draft + 1) // PAGE_SIZE)
    num_pages = min(budget // page_bytes, useful)
    max_context = min(wanted, num_pages * PAGE_SIZE - config.max_draft - 1)
    if max_context < 2 or (config.max_context is not None and max_context < wanted):
        need = page_bytes * -(-((config.max_context or PAGE_SIZE) + config.max_draft + 1) // PAGE_SIZE)
        raise OutOfMemory(
            f"a KV cache of {budget / 2**20:.1f} MiB holds {max(max_context, 0)} tokens of one sequence; "
            f"{need / 2**20:.1f} MiB are needed: raise kv_memory or lower max_context"
        )
    return Memory(page_bytes=page_bytes, num_pages=num_pages, max_context=max_context)


def kv_budget(target: ReadyModel, recipes: Sequence[Recipe], config: EngineConfig) -> int:
    """Return the bytes for keys and values: what the user says, else the rest of a GPU after its largest passes, or a
    part of a CPU's memory."""
    if config.kv_memory is not None:
        return config.kv_memory
    if target.decoder is None:
        models = [target, *(made.model for made in recipes if made.model is not None)]
        unread = sum(model.unread_bytes for model in models)
        return min(DEFAULT_KV_MEMORY, max(0, available_memory() - unread) // 4)
    import torch

    outs = min(config.max_sequences * (1 + config.max_draft), config.max_sequences + config.max_draft_tokens)
    target.profile(config.max_step_tokens, outs)
    for made in recipes:
        if made.profile is not None:
            made.profile(config.max_step_tokens, 2 * config.max_sequences)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(target.decoder.device)
    lanes = config.max_sequences * sum(made.lane_bytes for made in recipes)
    return max(0, free - lanes - max(GRAPH_MEMORY, int(GRAPH_SHARE * total)))
