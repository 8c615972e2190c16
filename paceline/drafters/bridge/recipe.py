"""The recipe of a draft model with another vocabulary, and what to expect of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from paceline.drafters.bridge.drafter import BridgedDrafter
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.errors import InvalidRequest, VocabularyMismatch
from paceline.prompts.files import read_prompts
from paceline.runner.loading.models import ReadyModel
from paceline.text.bridge import VocabularyBridge

logger = logging.getLogger(__name__)

# Pages of a drafter for one of the target. Its text has 1.03 times as many tokens (SmolLM2 beside Qwen2.5) to 1.15
# times (Llama's SentencePiece beside Qwen2.5), on MT-bench and HumanEval: docs/experiments.md, "Other vocabularies".
PAGES = 1.25
MAX_GROWTH = 2  # tokens of the drafter for one of the target, at most, for as long as it drafts
SHORT = "%s knows %d tokens of context, and sequences may have %d: beyond it they go on without its drafts"
# Of the drafted tokens in 12 answers each (docs/experiments.md, "Other vocabularies").
EXPECTED = "for Qwen2.5-Coder-1.5B, 33% of SmolLM2's drafted tokens were accepted, and 56% of its own 0.5B model's"
SAMPLE = {"mt_bench": 40, "humaneval": 20}  # prompts whose tokens are counted


def find_bridge(drafter: ReadyModel, target: ReadyModel) -> VocabularyBridge | None:
    """Return the bridge that a drafter needs beside a target. None: each id that both know means the same."""
    if drafter.tokenizer is None or target.tokenizer is None:
        return None  # random weights
    if target.tokenizer.same_vocabulary(drafter.tokenizer) is None:
        return None
    if target.decoder is not None:
        raise InvalidRequest(
            f"{drafter.name} has another vocabulary than {target.name}, and drafts over a bridge run on a CPU only: "
            "take a drafter of the target's own family, or --device cpu"
        )
    bridge = VocabularyBridge(target.tokenizer, drafter.tokenizer)
    if not bridge.common:
        raise VocabularyMismatch(
            f"{drafter.name} cannot draft for {target.name}: they have no token in common; take another drafter"
        )
    return bridge


def bridged_recipe(
    bridge: VocabularyBridge, ready: ReadyModel, target: ReadyModel, options: Mapping[str, Any]
) -> Recipe:
    """Make the recipe of a drafter over a bridge. `options`: of `BridgedDrafter`."""
    if "branches" in options:
        raise InvalidRequest(
            f"{ready.name} has another vocabulary than {target.name}: its drafts have no branches; leave branches out"
        )
    own, longest = ready.model.config.max_context, target.model.config.max_context
    short = f". It drafts within its {own} tokens of context, the target has {longest}" if own < longest else ""
    how = f"{described(bridge)}{short}"
    logger.info("%s drafts for %s: %s", ready.name, target.name, how)

    def build(context: BuildContext) -> BridgedDrafter:
        num_pages = math.ceil(PAGES * context.pool.num_pages)
        max_context = min(ready.model.config.max_context, MAX_GROWTH * context.max_context)
        if max_context < context.max_context:
            logger.warning(SHORT, ready.name, max_context, context.max_context)
        return BridgedDrafter(
            ready.forward(num_pages=num_pages, threads=context.threads, max_context=max_context, ranks=context.ranks),
            bridge,
            sequences=len(context.lanes.lengths),
            max_context=max_context,
            vocab_size=context.vocab_size,
            chunk=context.max_step_tokens,
            share_prefixes=context.share_prefixes,
            **options,
        )

    return Recipe(
        name=BridgedDrafter.name,
        build=build,
        how=f"{ready.why}; {how}",
        page_bytes=math.ceil(PAGES * ready.page_bytes),
        pass_bytes=ready.pass_bytes,
        vocabulary=bridge.common,
        model=ready,
    )


def described(bridge: VocabularyBridge) -> str:
    """Say what two vocabularies have in common, and what follows for drafts."""
    texts = [prompt.text for name, count in SAMPLE.items() for prompt in read_prompts(name, count=count)]
    return (
        f"another vocabulary, {bridge.common} tokens in common: {bridge.share:.0%} of the target's, and "
        f"{bridge.share_of(texts):.0%} of the tokens in text and code; other tokens are re-encoded. Expect fewer "
        f"accepted tokens than from a model of the target's family ({EXPECTED}): inspect --pair measures them"
    )
