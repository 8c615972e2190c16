"""The target's first layers as a drafter: `layers:N`, or `layers:auto` for as many as pay on this machine.

They are followed by the target's last norm and output layer. No weight is copied, and no prompt is read: for committed
tokens, keys and values of these layers are the target's own, bit by bit. The layers write those of their guesses behind
them, and verification writes over all of these.

Drafts are chains. How sure early layers are says little (docs/experiments.md, "Early layers of SmolLM2"), so that the
engine's pace sets the length, by past acceptance. A GPU runs `layers:N` inside its rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.layers.choice import WORTH, Choice, choose
from paceline.drafters.model import make_drafter
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.self_copy import on_target_memory
from paceline.errors import InvalidRequest
from paceline.kernels.base import Forward
from paceline.kernels.cpu.build import load_library
from paceline.models.digest import files_digest
from paceline.models.weights import Progress
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.loading.memory import pass_bytes
from paceline.runner.loading.models import ReadyModel
from paceline.runner.loading.shortlist import beginnings
from paceline.runner.parallel.forward import SplitForward

logger = logging.getLogger(__name__)
NAME = "layers"
AUTO = "auto"
PROMPTS = {"spec_bench": 6, "code_edit": 2}  # sets of prompts → prompts that the target continues for a measurement


class UnfitLayers(Drafter):
    """Stands for early layers whose drafts do not pay, and says why."""

    name = NAME

    def __init__(self, why: str) -> None:
        self.unfit = why

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [EMPTY] * len(asks)


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    words, _, rest = options.partition(",")
    given = parse_options(NAME, rest, {"max_draft": int})
    if words == AUTO:
        return _measured(target, given)
    layers, model = _count(words, target), target.model
    how = f"the target's first {layers} of {model.config.num_layers} layers, on its KV memory"
    if target.decoder is not None:
        if given:
            raise InvalidRequest("layers:max_draft is for a CPU; on a GPU the engine's max_draft bounds all drafts")
        made = on_target_memory(NAME, target.decoder.leading(layers), f"{layers} layers of {target.name}", how=how)
        return replace(made, weight_bytes=0)

    def build(context: BuildContext) -> Drafter:
        return drafter_of(context, layers, **given)

    return Recipe(
        name=NAME,
        build=build,
        how=how,
        pass_bytes=pass_bytes(model.leading(layers), packed=target.compiled),
        weight_bytes=0,
    )


def drafter_of(context: BuildContext, layers: int, *, max_draft: int = 4) -> Drafter:
    """Make the drafter of the target's first layers."""
    assert isinstance(context.target, (CompiledForward, TorchForward, SplitForward)), "a CPU has these"
    return drafter_on(context.target.leading(layers), context, max_draft=max_draft)


def drafter_on(part: Forward, context: BuildContext, *, max_draft: int = 4) -> Drafter:
    """Make a drafter of a part of the target, which shares its KV memory."""
    return make_drafter(part, context, shares_kv=True, name=NAME, max_draft=max_draft, branches=1, min_confidence=0.0)


def _count(words: str, target: ReadyModel) -> int:
    """Read a number of layers."""
    most = target.model.config.num_layers - 1
    if not words.isascii() or not words.isdigit() or not 1 <= int(words) <= most:
        raise InvalidRequest(
            f"layers:{words} is no part of {target.name}, which has {most + 1} layers: take layers:1 to "
            f"layers:{most}, or layers:auto for as many as pay on this machine"
        )
    return int(words)


def _measured(target: ReadyModel, given: dict[str, Any]) -> Recipe:
    """Make the recipe of `layers:auto`. It is measured once the target is built, and before any request."""
    tokenizer = target.tokenizer
    if not target.compiled or target.split is not None or tokenizer is None:
        raise InvalidRequest(
            f"layers:auto measures compiled passes over text, and {target.name} {_lacking(target)}: take a number of "
            "layers, such as layers:1"
        )

    def build(context: BuildContext) -> Drafter:
        assert isinstance(context.target, CompiledForward), "the target is compiled"
        prompts = beginnings(tokenizer, context.vocab_size, sources=PROMPTS)
        choice = choose(context.target, prompts, question=_identity(target))
        if choice is None or not choice.pays:
            why = f"layers:auto drafts nothing for {target.name}: {_reason(choice)}"
            logger.warning("%s", why)
            return UnfitLayers(why)
        logger.info("layers:auto drafts with %d layers: a speed-up of %.2f", choice.layers, choice.speedup)
        return drafter_of(context, choice.layers, **{"max_draft": choice.draft, **given})

    return Recipe(
        name=NAME,
        build=build,
        how="as many of the target's first layers as pay on this machine, on its KV memory",
        pass_bytes=target.pass_bytes,
        weight_bytes=0,
    )


def _lacking(target: ReadyModel) -> str:
    """Say why layers of a target cannot be measured."""
    if target.decoder is not None:
        return "runs on a GPU"
    if not target.compiled:
        return "runs in torch"
    return "is split over ranks" if target.split is not None else "has no tokenizer"


def _identity(target: ReadyModel) -> tuple[object, ...]:
    """Return what acceptance and times of a target depend on, beside the machine."""
    files = files_digest(target.stored.source.files()) if target.stored is not None else target.name
    return files, target.stored and target.stored.format, target.model.config, load_library().variant


def _reason(choice: Choice | None) -> str:
    if choice is None:
        return "the machine is too busy to measure; start again when it is quiet, or take a number of layers"
    return (
        f"the best choice, drafts of {choice.draft} by {choice.layers} layers, has a measured speed-up of "
        f"{choice.speedup:.2f} over plain decoding, and {WORTH:.2f} is needed"
    )
