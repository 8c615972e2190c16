"""The target as its own drafter on a CPU: a copy of its layers in fewer bits.

Beside a compiled target the copy shares everything else: embedding, norms, output layer, KV memory and threads. It
reads the target's keys and values and writes those of its guesses into the slots that verification writes next. A
prefetched pass of the target, which might have filled them, is cancelled by the copy's first pass (`CompiledForward`).
A target that runs in torch has keys and values of another format. Beside it the copy is a whole compiled model with KV
memory of its own, and reads prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from paceline.drafters.base import Drafter
from paceline.drafters.model import make_drafter, recipe_of
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.errors import InvalidRequest, UnknownOption
from paceline.kernels.quant import values_of
from paceline.models.load import layer_of
from paceline.models.weights import Format, Progress, Weight, describe_weights, weight_bytes
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.decoder_pack import INTERLEAVED, output_layer
from paceline.runner.loading.memory import weight_parts
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.runner.loading.splitting import split_beside

FORMATS = ("int4", "int8")


def recipe(name: str, format: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    """Make the recipe of the drafter `name`."""
    if format not in FORMATS:
        raise UnknownOption(f"format of the {name} drafter on a CPU", format, FORMATS)
    wanted = cast(Format, format)
    if target.stored is None:
        raise InvalidRequest(
            f"{target.name} has random weights, and no files to read a copy from: take another drafter"
        )
    if not target.has_whole_program:
        whole = read_model(target.name, format=wanted, progress=progress, beside=target, shortlist=True)
        copy = split_beside(whole, target)
        return replace(recipe_of(copy, target, {}, kind=name), how=f"the target in {format}, with KV memory of its own")
    copy = copy_of(target, wanted)

    def build(context: BuildContext) -> Drafter:
        return drafter_of(copy, context, name=name)

    return Recipe(
        name=name,
        build=build,
        how=f"the target's layers in {format}, on its KV memory",
        pass_bytes=copy.pass_bytes + weight_bytes(target.model.weights[output_layer(target.model.weights)]),
        model=copy,
    )


def drafter_of(copy: ReadyModel, context: BuildContext, *, name: str) -> Drafter:
    """Build the drafter of a copy of some weights: all others are the target's."""
    target = context.target
    assert isinstance(target, CompiledForward), "the target is compiled"
    pack = copy.packed(target.threads)
    pack.complete(target.pack)
    return make_drafter(target.with_kv(target.config, pack), context, shares_kv=True, name=name)


def copy_of(target: ReadyModel, format: Format) -> ReadyModel:
    """Describe those matrices of the target's layers that lose bits in this format, still in their files."""
    assert target.stored is not None, "there are files"
    own, stored = target.model.weights, target.stored
    weights = smaller(own, describe_weights(stored.source, target.model.config, format=format))
    if not weights:
        more = "int8" if format == "int4" else "fp32"
        raise InvalidRequest(
            f"no layer of {target.name} loses bits in {format}, and a drafter as slow as the target can only lose: "
            f"take another drafter, or load the target with more bits, such as --format {more}"
        )
    model = replace(target.model, weights=weights)
    return replace(
        target,
        model=model,
        why=f"the layers of {target.name} in {format}",
        parts=weight_parts(model, packed=True),
        stored=replace(stored, format=format),
    )


def smaller(own: Mapping[str, Weight], fewer: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the matrices of layers that have fewer bytes than the target's own, with their biases. Matrices that are
    interleaved go together."""
    chosen = {name for name in fewer if layer_of(name) >= 0 and weight_bytes(fewer[name]) < weight_bytes(own[name])}
    for name in fewer:
        prefix, _, kind = name.rpartition(".")
        pair = {name, f"{prefix}.{INTERLEAVED[kind]}"} if kind in INTERLEAVED else set()
        chosen |= pair if pair & chosen else set()
    matrices = {name for name in chosen if values_of(fewer[name]).dim() == 2}
    return {
        name: weight for name, weight in fewer.items() if name in matrices or name.removesuffix(".bias") in matrices
    }
