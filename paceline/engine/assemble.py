"""Assemble an engine from names: read the models, divide the memory, build everything that a step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.config import EngineConfig
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.registry import PORTFOLIO, check_corpus, check_device, check_split
from paceline.engine.building import build, prepare, read_recipes
from paceline.engine.device_ranks import RankModels, lead
from paceline.engine.engine import Engine
from paceline.engine.memory_share import Memory, share_memory
from paceline.errors import InvalidRequest, UnknownOption
from paceline.models.advice import Advice
from paceline.models.weights import Format, Progress
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.runner.loading.rank_threads import threads_by_cores
from paceline.runner.loading.splitting import check_place, split_model
from paceline.runner.loading.stages import stage
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.rounds.graphs import Prepared
from paceline.runner.rounds.protocol import Rounds
from paceline.text.tokenizer import Tokenizer

ATTENTION_SPEED = 0.8  # operations a second of attention over long prompts, relative to products (H200)


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
    seed: int = 0,
) -> Parts:
    """`cores`: of all processes together, which share them where `threads` of each are not given. `progress`: called
    with bytes of weights read, and in all; `recording`: with graphs of a GPU recorded, and in all. `seed`: of random
    weights, for a shape that ranks make by its name."""
    for words in drafters:
        check_device(words, device if isinstance(target, str) else target.device)
    check_corpus(config.corpus, drafters)
    check_split(drafters, config.drafter_tensor_parallel)
    rounds: Rounds | None
    if isinstance(target, str) and config.is_split and device != "cpu":
        models, rounds, ranks = lead(
            target, drafters, config, format=format, seed=seed, progress=progress, recording=recording
        )
        watch = None if ranks is None else ranks.check
    else:
        ready = target
        if isinstance(ready, str):
            ready = read_target(ready, format=format, device=device, config=config, progress=progress)
        ready = split_as_asked(ready, config, threads=threads)
        if threads is None and cores is not None:
            threads = threads_by_cores(cores, config.tensor_parallel)
        recipes = read_recipes(drafters, ready, progress=progress)
        memory = share_memory(ready, [*recipes.values()], config)
        built = build(ready, recipes, memory, config, threads=threads)
        models = RankModels(ready, recipes, memory, built, prepare(built, recipes, config, recording=recording))
        rounds = built.rounds
        watch = built.forward.ranks.check if isinstance(built.forward, SplitForward) else None
    built, tokenizer, model = models.built, models.target.tokenizer, models.target.model.config
    engine = Engine(
        built.forward,
        config=config,
        lanes=built.lanes,
        cache=built.cache,
        max_context=models.memory.max_context,
        even_context=ATTENTION_SPEED * model.even_context,
        eos_ids=sorted({*model.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}),
        drafters=built.drafters,
        default_drafter=_default(models.recipes, config),
        tokenizer=tokenizer,
        rounds=rounds,
        watch=watch,
    )
    return Parts(
        engine=engine,
        target=models.target,
        drafters=models.recipes,
        memory=models.memory,
        bitwise=built.forward.bitwise,
        context=built.context,
        prepared=models.prepared,
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


def _default(recipes: Mapping[str, Recipe], config: EngineConfig) -> str | None:
    """Return the drafter of requests that name none: the user's choice, else the portfolio, else the first one."""
    chosen = config.default_drafter
    if chosen is None:
        return PORTFOLIO if PORTFOLIO in recipes else next(iter(recipes), None)
    if chosen not in recipes:
        raise UnknownOption("default_drafter", chosen, recipes)
    return chosen
