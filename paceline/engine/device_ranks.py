"""An engine over several GPUs: what every rank reads and builds, and how rank 0 starts the others.

All ranks do the same, each with its own part of the target, until rounds are prepared. From then on rank 0 has the
engine, and the others repeat the calls of its rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.drafters.recipe import Recipe
from paceline.engine.building import Built, build, prepare, read_recipes
from paceline.engine.memory_share import Memory, kv_budget, share_memory
from paceline.errors import InvalidRequest
from paceline.models.weights import Format, Progress
from paceline.runner.loading.device_ranks import devices_of, read_rank
from paceline.runner.loading.models import ReadyModel
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Assemble
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.parallel.worker import end_with, main
from paceline.runner.rounds.graphs import Prepared
from paceline.runner.rounds.protocol import Rounds

WORKER = (sys.executable, "-m", "paceline.engine.device_ranks")
MEETING_SECONDS = 300.0  # time in which ranks that start come to the same point


@dataclass(frozen=True, slots=True)
class RankModels:
    """A rank's models, and its memory divided among them."""

    target: ReadyModel
    recipes: Mapping[str, Recipe]
    memory: Memory
    built: Built
    prepared: Prepared | None

    @classmethod
    def of(
        cls,
        order: Assemble,
        exchange: Exchange,
        *,
        progress: Progress | None = None,
        recording: Progress | None = None,
    ) -> RankModels:
        """Read and build a rank's models. The rank with the least free memory decides on the pages of all."""
        config, device = order.config, order.devices[exchange.rank]
        torch.cuda.set_device(device)
        target = read_rank(
            order.target,
            exchange,
            format=order.format,
            device=device,
            kv_format="bf16" if config.kv_format == "auto" else config.kv_format,
            degree=config.tensor_parallel,
            same_bits=config.same_bits_across_degrees,
            timeout=config.rank_timeout,
            seed=order.seed,
            progress=progress,
        )
        recipes = read_recipes(order.drafters, target, progress=progress)
        budgets = exchange.swap(torch.tensor([kv_budget(target, [*recipes.values()], config)]))
        memory = share_memory(target, [*recipes.values()], config, budget=min(int(each) for each in budgets))
        built = build(target, recipes, memory, config, threads=None)
        prepared = prepare(built, recipes, config, recording=recording)
        exchange.swap(torch.zeros(1))  # nobody launches before all can follow
        return cls(target, recipes, memory, built, prepared)


def lead(
    target: str,
    drafters: Sequence[str],
    config: EngineConfig,
    *,
    format: Format,
    seed: int = 0,
    progress: Progress | None = None,
    recording: Progress | None = None,
) -> tuple[RankModels, Rounds, Ranks | None]:
    """Start the other ranks, and return this one's models, its rounds and the ranks; None: it is alone."""
    from paceline.runner.rounds.ranks import LeadingRounds

    if config.drafter_tensor_parallel > 1:
        raise InvalidRequest(
            f"drafter_tensor_parallel {config.drafter_tensor_parallel}: on GPUs every rank has the whole drafter, and "
            "none waits for it; leave the option out"
        )
    order = Assemble(-1, target, format, seed, tuple(drafters), config, tuple(devices_of(config.tensor_parallel)))
    if config.tensor_parallel == 1:
        models = RankModels.of(order, Exchange(None, rank=0, size=1), progress=progress, recording=recording)
        assert models.built.rounds is not None, "a GPU has rounds"
        return models, models.built.rounds, None
    ranks = Ranks(
        config.tensor_parallel, threads=1, timeout=config.rank_timeout, meeting=MEETING_SECONDS, command=WORKER
    )

    def mine(order: Assemble, exchange: Exchange, look: Callable[[], None]) -> RankModels:
        def report(done: int, total: int) -> None:
            look()
            if progress is not None:
                progress(done, total)

        return RankModels.of(order, exchange, progress=report, recording=recording)

    try:
        key, models = ranks.load(lambda key: replace(order, key=key), mine)
    except BaseException:
        ranks.close()
        raise
    rounds, decoder = models.built.rounds, models.target.decoder
    assert rounds is not None, "a GPU has rounds"
    assert decoder is not None, "a GPU has a decoder"
    assert decoder.share is not None, "the decoder of a rank has a part"
    return models, LeadingRounds(rounds, decoder.share.peers, ranks, key), ranks


def follow(order: Assemble, exchange: Exchange) -> object:
    """Build what another rank than 0 repeats rounds with."""
    from paceline.runner.rounds.ranks import FollowingRounds

    rounds = RankModels.of(order, exchange).built.rounds
    assert rounds is not None, "a GPU has rounds"
    return FollowingRounds(rounds)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.exit(main(int(sys.argv[1]), follow))
