"""Build what a step needs from models that are read: the target's Forward, drafters, and rounds where there is a GPU.

On several GPUs every rank builds the same, each with its own part of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.drafters.guard import Guard
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recipe import BuildContext, OnDevice, Recipe
from paceline.drafters.registry import PORTFOLIO, recipe
from paceline.engine.draft_rules import judge_drafts
from paceline.engine.memory_share import Memory
from paceline.errors import InvalidRequest
from paceline.kernels.base import Forward
from paceline.kv.cache import KVCache
from paceline.models.weights import Progress
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.lanes import Lanes
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel
from paceline.runner.loading.stages import stage
from paceline.runner.rounds.graphs import Prepared
from paceline.runner.rounds.protocol import DeviceDrafter
from paceline.runner.rounds.traits import network_of

if TYPE_CHECKING:
    from paceline.runner.rounds.cuda import CudaRounds


@dataclass(frozen=True, slots=True)
class Built:
    """An engine's models, ready for steps."""

    forward: Forward
    lanes: Lanes
    cache: KVCache
    context: BuildContext  # that drafters are built into, also later
    drafters: Mapping[str, Guard]
    rounds: CudaRounds | None  # None: a CPU


def read_recipes(drafters: Sequence[str], target: ReadyModel, *, progress: Progress | None = None) -> dict[str, Recipe]:
    """Read the drafters that a user names for a target."""
    recipes: dict[str, Recipe] = {}
    for words in drafters:
        made = recipe(words, target, progress=progress)
        if made.name in recipes:
            raise InvalidRequest(f"two drafters of the kind {made.name!r}; one of each can be loaded")
        recipes[made.name] = made
    return recipes


def build(
    target: ReadyModel, recipes: Mapping[str, Recipe], memory: Memory, config: EngineConfig, *, threads: int | None
) -> Built:
    """Build the target's Forward, which takes its weights, and the drafters."""
    forward = target.forward(
        num_pages=memory.num_pages,
        threads=threads,
        max_context=memory.max_context,
        taps=sorted({tap for made in recipes.values() for tap in made.taps}),
        beside=_drafter_bytes(recipes.values(), target, num_pages=memory.num_pages),
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
    rounds = _rounds(forward, recipes, built, memory, config) if target.decoder else None
    return Built(forward, lanes, cache, context, guards, rounds)


def prepare(
    built: Built, recipes: Mapping[str, Recipe], config: EngineConfig, *, recording: Progress | None = None
) -> Prepared | None:
    """Compile the kernels of rounds and record their graphs. `recording`: called with graphs recorded, and in all."""
    rounds, guards = built.rounds, built.drafters
    if rounds is None:
        return None
    longest = {name: guard.max_draft for name, guard in guards.items()}
    for name in rounds.drafters:
        if (network := network_of(name, rounds.drafters)) in guards:
            longest[name] = guards[network].max_draft
    hosts = [guards[name].max_draft for name in recipes if name in guards and name not in rounds.drafters]
    offers = min(max(hosts, default=0), config.max_draft)
    report = recording or (lambda done, total: None)
    advice = "set kv_memory, or lower max_context or max_sequences"
    with stage("compile kernels and record graphs"), memory_for("graphs and their scratch memory", advice):
        return rounds.prepare(longest, offers=offers, prompt_rows=config.max_step_tokens, report=report)


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
    drafters = with_portfolio(recipes, drafters)
    rounds = CudaRounds(
        forward,
        lanes=config.max_sequences,
        max_context=memory.max_context,
        max_draft=config.max_draft,
        max_draft_tokens=config.max_draft_tokens,
        drafters=drafters,
    )
    rounds.synthetic_acceptance, rounds.judge = config.synthetic_acceptance, judge_drafts
    return rounds


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


def with_portfolio(recipes: Mapping[str, Recipe], drafters: Mapping[str, DeviceDrafter]) -> dict[str, DeviceDrafter]:
    """Return the drafters of rounds with one that is made of the others, if a recipe asks for it.

    It comes first: it is the default, and graphs are recorded in this order."""
    made = {name: one.of_members(drafters) for name, one in recipes.items() if one.of_members is not None}
    return {**made, **drafters}


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
