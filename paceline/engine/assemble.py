"""Assemble an engine from names: read the models, divide the memory, build everything that a step needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.drafters.guard import Guard
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recipe import BuildContext, OnDevice, Recipe
from paceline.drafters.registry import PORTFOLIO, check_corpus, check_device, check_split, recipe
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest, OutOfMemory, UnknownOption
from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.kv.cache import KVCache
from paceline.models.advice import Advice
from paceline.models.weights import Format, Progress
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.lanes import Lanes
from paceline.runner.loading.memory import available_memory, memory_for
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.runner.loading.rank_threads import threads_by_cores
from paceline.runner.loading.splitting import check_place, split_model
from paceline.runner.loading.stages import stage
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.rounds.graphs import Prepared
from paceline.runner.rounds.protocol import DeviceDrafter
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.runner.rounds.cuda import CudaRounds

ATTENTION_SPEED = 0.8  # operations a second of attention over long prompts, relative to products (H200)
DEFAULT_KV_MEMORY = 4 << 30  # bytes on a CPU; less if that is over a quarter of the available memory
GRAPH_MEMORY = 2 << 30  # bytes of a GPU left free for graphs, their scratch memory and the driver
GRAPH_SHARE = 0.03  # part of the GPU left free for them if that is more


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV memory of an engine, in pages."""

    page_bytes: int  # bytes of one page, of the target and all drafters together
    num_pages: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Parts:
    """An engine and its parts."""

    engine: Engine
    target: ReadyModel
    drafters: Mapping[str, Recipe]
    memory: Memory
    bitwise: bool
    context: BuildContext  # that drafters are built into, also later
    prepared: Prepared | None = None  # graphs of a GPU; None: a CPU has none

    @property
    def tokenizer(self) -> Tokenizer:
        if self.target.tokenizer is None:
            raise InvalidRequest(f"{self.target.name} has random weights and no tokenizer: give prompts as token ids")
        return self.target.tokenizer

    @property
    def generation(self) -> Advice:
        return self.target.model.generation


@stage("load everything, after imports")
def assemble(
    target: str | ReadyModel,
    *,
    drafters: Sequence[str] = (),
    format: Format = "auto",
    device: str = "cpu",
    threads: int | None = None,
    cores: int | None = None,
    config: EngineConfig,
    progress: Progress | None = None,
    recording: Progress | None = None,
) -> Parts:
    """`cores`: of all processes together, which share them where `threads` of each are not given. `progress`: called
    with bytes of weights read, and in all; `recording`: with graphs of a GPU recorded, and in all."""
    for words in drafters:
        check_device(words, device if isinstance(target, str) else target.device)
    check_corpus(config.corpus, drafters)
    check_split(drafters, config.drafter_tensor_parallel)
    ready = target
    if isinstance(ready, str):
        ready = read_target(ready, format=format, device=device, config=config, progress=progress)
    ready = split_as_asked(ready, config, threads=threads)
    if threads is None and cores is not None:
        threads = threads_by_cores(cores, config.tensor_parallel)
    recipes: dict[str, Recipe] = {}
    for words in drafters:
        made = recipe(words, ready, progress=progress)
        if made.name in recipes:
            raise InvalidRequest(f"two drafters of the kind {made.name!r}; one of each can be loaded")
        recipes[made.name] = made
    memory = share_memory(ready, list(recipes.values()), config)
    taps = sorted({tap for made in recipes.values() for tap in made.taps})
    forward = ready.forward(
        num_pages=memory.num_pages,
        threads=threads,
        max_context=memory.max_context,
        taps=taps,
        beside=_drafter_bytes(recipes.values(), ready, num_pages=memory.num_pages),
    )
    lanes = Lanes(count=config.max_sequences, max_context=memory.max_context, max_draft=config.max_draft)
    cache = KVCache(forward.kv, share_prefixes=config.prefix_cache)
    guards: dict[str, Guard] = {}
    context = BuildContext(
        lanes=lanes,
        pool=cache.pool,
        vocab_size=forward.vocab_size,
        max_context=memory.max_context,
        max_step_tokens=config.max_step_tokens,
        threads=forward.threads if isinstance(forward, CompiledForward) else threads,
        target=forward,
        corpus=config.corpus,
        drafters=guards,
        share_prefixes=config.prefix_cache,
    )
    built: dict[str, Drafter | None] = {}
    for made in sorted(recipes.values(), key=_building_order):
        built[made.name] = drafter = build_drafter(made, context)
        if drafter is not None:
            guards[made.name] = Guard(drafter, vocab_size=forward.vocab_size, timeout=config.drafter_timeout)
    if PredictionDrafter.name not in built:  # costs nothing until a request has a prediction
        built[PredictionDrafter.name] = predicting = PredictionDrafter()
        guards[predicting.name] = Guard(predicting, vocab_size=forward.vocab_size, timeout=config.drafter_timeout)
    rounds = _rounds(forward, recipes, built, memory, config) if ready.decoder else None
    engine = Engine(
        forward,
        config=config,
        lanes=lanes,
        cache=cache,
        max_context=memory.max_context,
        even_context=ATTENTION_SPEED * ready.model.config.even_context,
        eos_ids=sorted({*ready.model.config.eos_ids, *(ready.tokenizer.eos_ids if ready.tokenizer else ())}),
        drafters=guards,
        default_drafter=_default(recipes, config),
        tokenizer=ready.tokenizer,
        rounds=rounds,
        watch=forward.ranks.check if isinstance(forward, SplitForward) else None,
    )
    prepared = None
    if rounds is not None:
        longest = {name: guard.max_draft for name, guard in guards.items()}
        hosts = [guards[name].max_draft for name in recipes if name in guards and name not in rounds.drafters]
        offers = min(max(hosts, default=0), config.max_draft)
        report = recording or (lambda done, total: None)
        advice = "set kv_memory, or lower max_context or max_sequences"
        with stage("compile kernels and record graphs"), memory_for("graphs and their scratch memory", advice):
            prepared = rounds.prepare(longest, offers=offers, prompt_rows=config.max_step_tokens, report=report)
    return Parts(
        engine=engine,
        target=ready,
        drafters=recipes,
        memory=memory,
        bitwise=forward.bitwise,
        context=context,
        prepared=prepared,
    )


def read_target(
    name: str, *, format: Format = "auto", device: str = "cpu", config: EngineConfig, progress: Progress | None = None
) -> ReadyModel:
    if config.kv_format != "auto" and device == "cpu":
        raise InvalidRequest(f"kv_format {config.kv_format!r} is for a GPU; on a CPU leave it at 'auto'")
    if config.is_split:
        check_place(device, config.tensor_parallel)
    kv_format = "bf16" if config.kv_format == "auto" else config.kv_format
    return read_model(name, format=format, device=device, kv_format=kv_format, progress=progress)


def split_as_asked(ready: ReadyModel, config: EngineConfig, *, threads: int | None) -> ReadyModel:
    """Return the target over as many ranks as the config says; itself if it says one."""
    if not config.is_split:
        return ready
    split = split_model(
        ready,
        degree=config.tensor_parallel,
        same_bits=config.same_bits_across_degrees,
        timeout=config.rank_timeout,
        threads=threads,
    )
    return replace(split, splits_drafters=config.drafter_tensor_parallel > 1)


def _drafter_bytes(recipes: Iterable[Recipe], target: ReadyModel, *, num_pages: int) -> list[int]:
    """Count the bytes that drafters will take on each rank of a target."""
    ranks = 1 if target.split is None else target.split.degree
    each = [made.rank_bytes(num_pages, ranks) for made in recipes]
    return [sum(of_rank) for of_rank in zip([0] * ranks, *each, strict=True)]


def _rounds(
    forward: Forward,
    recipes: Mapping[str, Recipe],
    built: Mapping[str, Drafter | None],
    memory: Memory,
    config: EngineConfig,
) -> CudaRounds:
    """Build the rounds on a GPU, with every drafter that can run inside them."""
    from paceline.runner.forwards.cuda import CudaForward
    from paceline.runner.rounds.cuda import CudaRounds

    assert isinstance(forward, CudaForward)
    drafters = {
        name: _checked(name, make(built[name], forward)) for name, make in inside_rounds(recipes, built).items()
    }
    return CudaRounds(
        forward,
        lanes=config.max_sequences,
        max_context=memory.max_context,
        max_draft=config.max_draft,
        max_draft_tokens=config.max_draft_tokens,
        drafters=drafters,
    )


def inside_rounds(recipes: Mapping[str, Recipe], built: Mapping[str, Drafter | None]) -> dict[str, OnDevice]:
    """Return the functions that make drafters for the rounds of a device.

    A drafter that needs a prediction is left to the host beside others: drafters of a device take turns, and those of
    the host do not."""
    alone = len(recipes) == 1
    predicting = [name for name, drafter in built.items() if drafter is not None and drafter.needs_prediction]
    return {
        name: made.on_device
        for name, made in recipes.items()
        if made.on_device is not None and (alone or name not in predicting)
    }


def _default(recipes: Mapping[str, Recipe], config: EngineConfig) -> str | None:
    """Return the drafter of requests that name none: the user's choice, else the portfolio, else the first one."""
    chosen = config.default_drafter
    if chosen is None:
        return PORTFOLIO if PORTFOLIO in recipes else next(iter(recipes), None)
    if chosen not in recipes:
        raise UnknownOption("default_drafter", chosen, recipes)
    return chosen


def _building_order(made: Recipe) -> tuple[bool, int]:
    """Order drafters by the cost of a pass; the portfolio comes after all of its members."""
    return made.name == PORTFOLIO, made.pass_bytes


def build_drafter(made: Recipe, context: BuildContext) -> Drafter | None:
    """Build a drafter, which may be another package's: raises InvalidRequest if it is none."""
    drafter = made.build(context)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise InvalidRequest(
            f"drafter {made.name!r} was built as {type(drafter).__name__!r}, which is no paceline.drafters.Drafter: "
            "derive the class from it"
        )
    return drafter


def _checked(name: str, drafter: object) -> DeviceDrafter:
    """Return the drafter that a recipe made for the device; raise InvalidRequest if rounds cannot run it."""
    if not isinstance(drafter, DeviceDrafter):
        lacking = [member for member in ("reader", "finds_fewer", "draft") if not hasattr(drafter, member)]
        raise InvalidRequest(
            f"drafter {name!r} gave the device {type(drafter).__name__!r}, which is no "
            f"paceline.drafters.DeviceDrafter: it lacks {', '.join(lacking)}"
        )
    return drafter


def share_memory(target: ReadyModel, recipes: Sequence[Recipe], config: EngineConfig) -> Memory:
    """Divide the KV memory into pages, but never more than all sequences together could use."""
    page_bytes = target.page_bytes + sum(made.page_bytes for made in recipes)
    model_context = target.model.config.max_context
    wanted = config.max_context or model_context
    if wanted > model_context:
        raise InvalidRequest(f"max_context {wanted} is more than the {model_context} tokens that {target.name} knows")
    budget = config.kv_memory if config.kv_memory is not None else _budget(target, recipes, config)
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


def _budget(target: ReadyModel, recipes: Sequence[Recipe], config: EngineConfig) -> int:
    """Return the bytes for keys and values: the rest of a GPU after its largest passes, or a part of a CPU's memory."""
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
