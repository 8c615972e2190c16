"""Every kind of drafter by name, and how a user's words become one.

    ngram                          lookup in prompt and output
    ngram:min_ngram=1,max_ngram=3  with options
    model:NAME, or just NAME       a model with the target's vocabulary
    model:NAME,format=native       with options: weight format, max_draft, min_confidence
    eagle:PATH, eagle:smollm2      an EAGLE-3 head trained for the target: a directory, a hub id, or one that is shipped
    prediction                     the text that a request predicts; always there, and first where a request has one
    medusa:PATH                    Medusa heads trained for the target: a directory or a hub id
    self, self:int4                on a GPU: the target itself in fewer bits (fp8, int8 or int4), on its own KV memory
    mine, mine:whatever            a kind of your own, after `register("mine", ...)`

A drafter is made in two steps, because KV memory is shared out only once all models are known: a `Recipe` says what a
page costs it, `build` makes the drafter in the engine's context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.drafters.base import Drafter
from paceline.drafters.copy import CopyingDrafter
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.drafters.medusa import MedusaDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PREDICTION, PredictionDrafter
from paceline.errors import InvalidRequest, ModelNotFound, UnknownOption, VocabularyMismatch
from paceline.kernels.base import Forward
from paceline.kv.pages import PagePool
from paceline.models.resolve import resolve
from paceline.models.weights import Format, Progress
from paceline.runner.lanes import Lanes
from paceline.runner.loading.heads import FORMATS, read_eagle, read_medusa
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel, read_model, ready_shape
from paceline.runner.rounds.protocol import Lookup

logger = logging.getLogger(__name__)
COPY = 5  # tokens that must have stood together before, for what followed to be copied
LONGEST_COPY = 16
SHIPPED = Path(__file__).parent / "shipped"
USUAL_ROWS = 8  # of a pass that costs hardly more than its weights do, where a Forward does not say


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The engine a drafter is built into."""

    lanes: Lanes
    pool: PagePool
    vocab_size: int
    max_context: int
    max_step_tokens: int
    threads: int | None
    target: Forward


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str  # what requests and statistics call the drafter
    build: Callable[[BuildContext], Drafter | None]  # None: only a device can run it
    how: str = "runs on the host"  # it drafts, in words
    page_bytes: int = 0  # of KV memory of its own
    pass_bytes: int = 0  # of weights that a draft pass reads
    taps: Sequence[int] = ()  # of the target, whose hidden states it reads
    model: ReadyModel | None = None
    on_device: OnDevice | None = None  # None: only the host can run it
    profile: Callable[[int, int], None] | None = None  # run the largest pass on the device: rows, rows with logits


OnDevice = Callable[[Drafter | None, Forward], Forward | Lookup]
"""(what was built, the target) → what the steps of a device draft with."""


Kind = Callable[[str, ReadyModel, Progress | None], Recipe]
"""(what stands after the colon, the target, told of loading) → a recipe."""


def _ngram(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    given = _parse("ngram", options, {"min_ngram": int, "max_ngram": int})
    drafter = NgramDrafter(**given)
    return Recipe(
        name="ngram",
        build=lambda context: drafter,
        how="looks up tokens, computes nothing",
        on_device=lambda built, to: Lookup(**given),
    )


def _model(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    name, _, rest = options.partition(",")
    given = _parse("model", rest, {"format": str, "max_draft": int, "min_confidence": float})
    ready = _read(name, target, given.pop("format", _drafting_format(target)), progress)
    _check_vocabulary(ready, target)
    if given.get("min_confidence") and target.decoder is not None:
        logger.warning(
            "min_confidence of %s ends no draft on a GPU, where all sequences of a round draft together; it holds "
            "only in steps that run on the host",
            name,
        )

    def build(context: BuildContext) -> Drafter:
        forward = ready.forward(
            num_pages=context.pool.num_pages, threads=context.threads, max_context=context.max_context
        )
        return ModelDrafter(
            forward,
            name="model",
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            chunk=context.max_step_tokens,
            **given,
        )

    def on_device(built: Drafter | None, to: Forward) -> Forward:
        assert isinstance(built, ModelDrafter)
        return built.forward

    return Recipe(
        name="model",
        build=build,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        model=ready,
        on_device=on_device,
        profile=ready.profile,
    )


def _eagle(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    directory, format, given = _head_options("eagle", options, {"copy": int, "branches": int})
    after = given.pop("copy", COPY)
    ready = read_eagle(directory, target, format=format)
    config = ready.head.config

    def build(context: BuildContext) -> Drafter:
        head = ready.forward(
            context.target,
            num_pages=context.pool.num_pages,
            max_context=context.max_context,
            threads=context.threads,
        )
        cheap_rows = getattr(context.target, "cheap_rows", USUAL_ROWS)
        drafter = EagleDrafter(
            head,
            taps=config.taps,
            width=3 * config.target_hidden_size,
            name="eagle",
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            chunk=context.max_step_tokens,
            **{"max_draft": cheap_rows - 1, **given},
        )
        return CopyingDrafter(drafter, after=after, longest=LONGEST_COPY) if after else drafter

    return Recipe(
        name="eagle",
        build=build,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        taps=config.taps,
    )


def _medusa(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    directory, format, given = _head_options("medusa", options, {})
    ready = read_medusa(directory, target, format=format)
    tap = target.model.config.num_layers
    return Recipe(
        name="medusa",
        build=lambda context: MedusaDrafter(ready.forward(threads=context.threads), tap=tap, name="medusa", **given),
        how=ready.why,
        pass_bytes=ready.pass_bytes,
        taps=(tap,),
    )


def _head_options(
    kind: str, options: str, more: Mapping[str, Callable[[str], Any]]
) -> tuple[Path, str, dict[str, Any]]:
    """Where the head lies, the format of its weights where they are integers, and what else was said."""
    name, _, rest = options.partition(",")
    given = _parse(kind, rest, {"format": str, "max_draft": int, "min_confidence": float, **more})
    format = given.pop("format", "int4")  # a draft need not be exact, and what it reads is what it costs
    if format not in FORMATS:
        raise UnknownOption(f"format of the {kind} drafter", format, FORMATS)
    return head_directory(name), format, given


def shipped_drafters(target: str, *, device: str) -> list[str]:
    """What drafts for a target that comes with a head, where nobody says otherwise. Not on a GPU: there heads draft
    with the host in between, which costs a small target more than they bring."""
    return [f"eagle:{target}"] if device == "cpu" and _is_shipped(target) else []


def _is_shipped(name: str) -> bool:
    return name.isidentifier() and (SHIPPED / name / "config.json").is_file()


def head_directory(name: str) -> Path:
    """Of heads that a user names: a directory, a hub id, or the name of one that is shipped with the package."""
    if _is_shipped(name):
        return SHIPPED / name
    path = resolve(name)
    if not path.is_dir():
        raise ModelNotFound(f"{name!r:.200} is a model's file, not a directory with a head")
    return path


def _prediction(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    _parse(PREDICTION, options, {})
    return Recipe(
        name=PREDICTION, build=lambda context: PredictionDrafter(), how="follows the text that a request predicts"
    )


def _self(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    format, formats = options or "fp8", ("fp8", "int8", "int4")
    if format not in formats:
        raise UnknownOption("format of the self drafter", format, formats)
    decoder = target.decoder
    if decoder is None:
        raise InvalidRequest(
            f"the self drafter shares the target's KV memory, which needs a GPU; on a CPU take model:{target.name}"
        )

    with memory_for(f"a copy of {target.name} in {format}", "take a smaller one such as self:int4, or another drafter"):
        copy = decoder.quantised(format)
    if all(mine is own for mine, own in zip(copy.matrices(), decoder.matrices(), strict=True)):
        raise InvalidRequest(
            f"no matrix of {target.name} can lose bits: as loaded all have 8 or fewer already, and a drafter as slow "
            "as the target can only lose; take another one, or load the target in bf16"
        )

    def on_device(built: Drafter | None, to: Forward) -> Forward:
        from paceline.runner.forwards.cuda import CudaForward

        assert isinstance(to, CudaForward)
        return CudaForward(copy, to.kv)

    def profile(rows: int, outs: int) -> None:
        what = f"a pass of {rows} tokens of the copy of {target.name}"
        with memory_for(what, "lower max_step_tokens or max_sequences"):
            copy.profile(rows, outs)

    return Recipe(
        name="self",
        build=lambda context: None,
        how=f"the target in {format}, on its KV memory",
        pass_bytes=copy.weight_bytes,
        on_device=on_device,
        profile=profile,
    )


REGISTRY: dict[str, Kind] = {
    "ngram": _ngram,
    "model": _model,
    "eagle": _eagle,
    "medusa": _medusa,
    "prediction": _prediction,
    "self": _self,
}


def register(name: str, kind: Kind) -> None:
    """From now on `LLM(…, drafter=name)` asks `kind` for a recipe. A name means one kind for good."""
    if not name.isidentifier():
        raise InvalidRequest(f"a kind of drafter is named with letters, digits and underscores, not {name!r}")
    if name in REGISTRY:
        raise InvalidRequest(f"there is already a kind of drafter named {name!r}; choose another name")
    REGISTRY[name] = kind


def recipe(words: str, target: ReadyModel, *, progress: Progress | None = None) -> Recipe:
    """What the user calls a drafter: a registered kind with options, or the name of a model."""
    kind, _, options = words.partition(":")
    if kind in REGISTRY:
        return REGISTRY[kind](options, target, progress)
    try:
        return _model(words, target, progress)
    except ModelNotFound as error:
        raise UnknownOption("drafter", words, [*REGISTRY, "or a model's name"]) from error


def _read(name: str, target: ReadyModel, format: Format, progress: Progress | None) -> ReadyModel:
    """`shape:NAME` has random weights."""
    if name.startswith("shape:"):
        return ready_shape(name[6:], format=format, device=target.device, kv_format=target.kv_format, seed=1)
    return read_model(name, format=format, device=target.device, kv_format=target.kv_format, progress=progress)


def _check_vocabulary(drafter: ReadyModel, target: ReadyModel) -> None:
    if drafter.tokenizer is None or target.tokenizer is None:
        return  # random weights
    difference = target.tokenizer.same_vocabulary(drafter.tokenizer)
    if difference is not None:
        raise VocabularyMismatch(
            f"{drafter.name} cannot draft for {target.name}: {difference}; take a drafter of the target's own family"
        )


def _drafting_format(target: ReadyModel) -> Format:
    """A draft need not be exact: where there are kernels for it, four bits are the fastest."""
    return "int4-all" if target.compiled else "auto"


def _parse(kind: str, options: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    values = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name not in known:
            raise UnknownOption(f"option of the {kind} drafter", name, known)
        try:
            values[name] = known[name](value)
        except ValueError:
            wanted = "a whole number" if known[name] is int else "a number"
            raise InvalidRequest(f"{kind}:{name} must be {wanted}, not {value!r}") from None
    return values
