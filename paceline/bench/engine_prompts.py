"""Prompts for the benchmark of the engine: random tokens, or real prompts by the model's chat template."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from paceline.bench.workloads import workload
from paceline.chat.template import ChatTemplate
from paceline.engine.assemble import Parts
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.bench.engine import Setup

LEAST_PROMPTS = 256  # read from a set, so that a batch has the same prompts whatever other batches a run has


def prompts_of(setup: Setup, parts: Parts) -> list[tuple[int, ...]]:
    """Make the prompts: random tokens, or real prompts by the model's chat template, without those that are longer."""
    most = max(setup.batches)
    if not setup.prompts:
        rng, vocab_size = random.Random(setup.seed), parts.target.model.config.vocab_size
        return [tuple(rng.randrange(vocab_size) for _ in range(setup.prompt_tokens)) for _ in range(most)]
    template = ChatTemplate(parts.tokenizer)
    given = workload(
        setup.prompts,
        data=None,
        count=max(4 * most, LEAST_PROMPTS),
        max_tokens=setup.output_tokens,
        words=lambda kind: 64,
    )
    encoded = [prompt.tokens or tuple(template.encode(prompt.messages)) for prompt in given]
    if not (kept := [tokens for tokens in encoded if len(tokens) <= setup.prompt_tokens]):
        raise InvalidRequest(f"no prompt has {setup.prompt_tokens} tokens or fewer: raise --prompt-tokens")
    return kept
