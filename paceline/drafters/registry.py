"""Every kind of drafter by name, and how a user's words become a recipe.

    ngram                          lookup in prompt and output
    ngram:min_ngram=1,max_ngram=3  with options
    suffix                         lookup in prompt, output, past answers and the corpus, by frequency
    model:NAME, or just NAME       a model; one with another vocabulary drafts over a bridge, on a CPU
    model:NAME,format=native       with options: weight format, max_draft, min_confidence
    eagle:PATH, eagle:smollm2      an EAGLE-3 head trained for the target: a directory, a hub id, or a shipped one
    block:PATH                     a block drafter trained for the target (DFlash, DSpark, DFlash2): as eagle:PATH
    mtp, mtp:PATH                  an MTP head: that in the target's own checkpoint, or that of a directory or a hub id
    medusa:PATH                    Medusa heads trained for the target: a directory or a hub id
    prediction                     the text that a request predicts; always there, and first where a request has one
    self, self:int4                the target itself in fewer bits (int8 or int4, on a GPU fp8, too), on its KV memory
    layers:N, layers:auto          the target's own first layers, on its KV memory; auto: on a CPU
    recycling                      on a CPU: the target's own likeliest tokens after each token, from earlier rows
    lookahead                      on a CPU: n-grams that the target guesses beside its verification
    portfolio                      all other drafters that are loaded, on a GPU a network and a lookup of them; there by
                                   itself where they are several
    mine, mine:whatever            your own kind, after `register("mine", …)`
    theirs, theirs:whatever        a kind of another installed package, by its entry point in `paceline.drafters`

A name means the built-in or registered kind first, then an entry point, then a model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline import plugins
from paceline.drafters import (
    block,
    eagle,
    layers,
    lookahead,
    medusa,
    model,
    mtp,
    ngram,
    portfolio,
    prediction,
    recycling,
    self_copy,
    suffix,
)
from paceline.drafters.base import Drafter
from paceline.drafters.recipe import BuildContext as BuildContext
from paceline.drafters.recipe import DrafterKind, MakeRecipe, OnGpu
from paceline.drafters.recipe import Recipe as Recipe
from paceline.drafters.shipped import head_directory as head_directory
from paceline.drafters.shipped import holds_block
from paceline.drafters.shipped import shipped_drafters as shipped_drafters
from paceline.drafters.suffix.corpus import read_corpus
from paceline.errors import InvalidRequest, ModelNotFound, NoCompiler, PacelineError, UnknownOption
from paceline.kernels.cpu.build import load_library
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

logger = logging.getLogger(__name__)


def _head(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    """Make the recipe of an EAGLE head, or of the block drafter that a directory turns out to hold."""
    make = block.recipe if holds_block(options.partition(",")[0]) else eagle.recipe
    return make(options, target, progress)


REGISTRY: dict[str, DrafterKind] = {
    ngram.NgramDrafter.name: DrafterKind(ngram.recipe, on_gpu="device"),
    suffix.SuffixDrafter.name: DrafterKind(suffix.recipe, on_gpu="host", reads_corpus=True),
    model.ModelDrafter.name: DrafterKind(model.recipe, on_gpu="device", computes=True, splits=True),
    eagle.EagleDrafter.name: DrafterKind(_head, on_gpu="device", computes=True),
    block.BlockDrafter.name: DrafterKind(block.recipe, on_gpu="device", computes=True),
    mtp.NAME: DrafterKind(mtp.recipe, on_gpu="device", computes=True),
    medusa.MedusaDrafter.name: DrafterKind(medusa.recipe, on_gpu="device", computes=True),
    prediction.PredictionDrafter.name: DrafterKind(prediction.recipe, on_gpu="device"),
    self_copy.NAME: DrafterKind(self_copy.recipe, on_gpu="device", computes=True, splits=True),
    layers.NAME: DrafterKind(layers.recipe, on_gpu="device", computes=True, splits=True),
    recycling.NAME: DrafterKind(recycling.recipe),
    lookahead.NAME: DrafterKind(lookahead.recipe),
    portfolio.PortfolioDrafter.name: DrafterKind(portfolio.recipe, on_gpu="device"),
}

BUILT_IN = frozenset(REGISTRY)
PORTFOLIO = portfolio.PortfolioDrafter.name
LOOKUPS = suffix.SuffixDrafter.name, ngram.NgramDrafter.name


def register(name: str, make: MakeRecipe, *, on_gpu: OnGpu = "refused") -> None:
    """Let `drafter=name` call `make` for a recipe, in this process; see `DrafterKind` for `on_gpu`.

    A name means one kind for good."""
    if not name.isidentifier():
        raise InvalidRequest(f"a kind of drafter is named with letters, digits and underscores, not {name!r}")
    if name in REGISTRY:
        raise InvalidRequest(f"there is already a kind of drafter named {name!r}; choose another name")
    REGISTRY[name] = DrafterKind(make, on_gpu)


def find(name: str) -> DrafterKind | None:
    """Return the kind that a name stands for: built in, registered, or of another installed package."""
    return REGISTRY.get(name) or _as_kind(name, plugins.load(plugins.DRAFTERS, name))


def default_drafters(target: str | ReadyModel, device: str, *, progress: Progress | None = None) -> list[str]:
    """Name the drafters of a target for users who ask for none: the head that comes with it, and on a CPU a lookup.
    `progress`: of a target that is fetched first."""
    return [*own_heads(target, progress=progress), *([_lookup()] if device == "cpu" else [])]


def own_heads(target: str | ReadyModel, *, progress: Progress | None = None) -> list[str]:
    """Name the head that comes with a target: that of this package, else one in the target's own checkpoint."""
    shipped = shipped_drafters(target if isinstance(target, str) else target.name)
    return shipped or mtp.in_checkpoint(target, progress)


def asked_drafters(
    words: Sequence[str] | None, target: str, device: str, *, progress: Progress | None = None
) -> list[str]:
    """List the drafters that an operator names, completed: none for the word none, the defaults without any word.
    `progress`: of a target that is fetched, to see whether it comes with a head."""
    if words:
        return [] if [*words] == ["none"] else completed(words, device)
    if device != "cpu":
        return [*own_heads(target, progress=progress), "ngram"]
    return completed(default_drafters(target, device, progress=progress), device)


def completed(drafters: Sequence[str], device: str) -> list[str]:
    """Complete the drafters that a user names, on a CPU: a lookup beside those that compute, and a portfolio of
    several."""
    names = [words.partition(":")[0] for words in drafters]
    members = [name for name in names if name not in (PORTFOLIO, prediction.PREDICTION)]
    if device != "cpu" or not (members or PORTFOLIO in names):
        return [*drafters]
    others = [words for words, name in zip(drafters, names, strict=True) if name != PORTFOLIO]
    if not any(name in LOOKUPS for name in names) and (not members or any(map(_computes, members))):
        others.append(_lookup())
    return [*others, PORTFOLIO] if PORTFOLIO in names or len(others) > 1 else others


def _computes(name: str) -> bool:
    kind = find(name)
    return kind.computes if kind is not None else name not in plugins.names(plugins.DRAFTERS)  # else a model's name


def _lookup() -> str:
    """Return the lookup that is always loaded on a CPU: in C where there is a compiler."""
    try:
        load_library()
    except NoCompiler:
        return ngram.NgramDrafter.name
    return suffix.SuffixDrafter.name


def check_device(words: str, device: str) -> None:
    """Refuse a drafter that cannot run beside a target on this device. Nothing is read for this."""
    name = words.partition(":")[0]
    kind = find(name)
    if kind is not None and kind.on_gpu == "refused" and device != "cpu":
        raise InvalidRequest(
            f"drafter {name!r} runs on a CPU only: it has no paceline.drafters.DeviceDrafter for a GPU "
            '(on_gpu="device" of its kind), and does not say that it may draft on the host beside one (on_gpu="host"); '
            "take another drafter, or --device cpu"
        )


def check_split(drafters: Sequence[str], degree: int) -> None:
    """Refuse drafters that cannot be split over `degree` ranks. Nothing is read for this."""
    if degree == 1:
        return
    names = [words.partition(":")[0] for words in drafters]
    splits = {name: _splits(name) for name in names}
    for name in names:
        if _computes(name) and not splits[name]:
            raise InvalidRequest(
                f"drafter_tensor_parallel {degree}: the drafter {name} runs whole on rank 0; leave the option out, or "
                "draft with a model"
            )
    if not any(splits.values()):
        raise InvalidRequest(
            f"drafter_tensor_parallel {degree}: there is no draft model to split; add one with drafter, or leave the "
            "option out"
        )


def _splits(name: str) -> bool:
    kind = find(name)
    return kind.splits if kind is not None else _computes(name)  # else a model's name


def check_corpus(paths: Sequence[str], drafters: Sequence[str]) -> None:
    """Refuse a corpus that no drafter reads, and files that cannot be read. No weights are read for this."""
    kinds = [find(words.partition(":")[0]) for words in drafters]
    if paths and not any(kind is not None and kind.reads_corpus for kind in kinds):
        raise InvalidRequest(f"the corpus {paths[0]!r} has no reader: add the drafter suffix, or leave the corpus out")
    for _ in read_corpus(paths):
        pass


def recipe(words: str, target: ReadyModel, *, progress: Progress | None = None) -> Recipe:
    """Make the recipe for a user's words: a kind of drafter with options, or the name of a model."""
    name, _, options = words.partition(":")
    kind = find(name)
    if kind is not None:
        make = kind.make if name in BUILT_IN else _foreign(name, kind)
        made = make(options, target, progress)
        if kind.on_gpu == "device" and target.device != "cpu" and made.on_device is None and made.of_members is None:
            raise InvalidRequest(
                f"drafter {name!r} is meant for a GPU (on_gpu='device'), but its recipe has no on_device that returns "
                "a paceline.drafters.DeviceDrafter"
            )
        return replace(made, words=words)
    if name in plugins.names(plugins.DRAFTERS):
        problem = plugins.problem(plugins.DRAFTERS, name) or "it is neither a DrafterKind nor a function"
        raise InvalidRequest(f"the drafter {name!r} of another package cannot be loaded: {problem}")
    try:
        return replace(model.recipe(words, target, progress), words=words)
    except ModelNotFound as error:
        if "/" in words:
            raise  # a path or a hub id, of which the error says more
        raise UnknownOption("drafter", words, [*names(), "the name of a model"]) from error


def _foreign(name: str, kind: DrafterKind) -> MakeRecipe:
    """Wrap a kind that is not built in: whatever its code raises becomes an error that names the drafter."""

    def make(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
        with _named(name):
            made = kind.make(options, target, progress)
        if not isinstance(made, Recipe):
            raise InvalidRequest(f"drafter {name!r} made a {type(made).__name__} instead of a paceline.drafters.Recipe")

        def build(context: BuildContext) -> Drafter | None:
            with _named(name):
                return made.build(context)

        return replace(made, build=build)

    return make


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:  # code of another package or of the user
        raise InvalidRequest(f"drafter {name!r} cannot be built: {type(error).__name__}: {error}") from error


def names() -> list[str]:
    """Name every kind of drafter that can be used: built in, registered, and of other packages."""
    others = [name for name in plugins.names(plugins.DRAFTERS) if name not in REGISTRY and find(name) is not None]
    return [*REGISTRY, *others]


def _as_kind(name: str, found: Any | None) -> DrafterKind | None:
    """Take what an entry point stands for: a DrafterKind, or a function that makes recipes for a CPU."""
    if found is None or isinstance(found, DrafterKind):
        return found
    if callable(found):
        return DrafterKind(found)
    logger.warning("the plug-in %s is a %s, not a DrafterKind or a function: skipped", name, type(found).__name__)
    return None
