"""Engines for tests: of tiny models, with limits so small that tests meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.drafters.recipe import BuildContext
from paceline.engine.engine import Engine
from paceline.kernels.base import Forward
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.text.tokenizer import Tokenizer
from tests.rig_drafters import DeviceRig, Made, device_drafters
from tests.tiny_models import CONTEXT, ON_GPU, TARGET
from tests.watched_rounds import WatchedRounds

LIMITS = {
    "max_draft_batch": 8,
    "max_sequences": 8,
    "max_step_tokens": 32,
    "max_draft": 8,
    "drafter_timeout": 60.0,
    "measure_cost": False,  # counts must not depend on how busy the machine is
    "measure_speedup": False,  # nor on which steps are drawn to run plain
}


@dataclass
class Rig:
    """An engine and what it was made of."""

    engine: Engine
    forward: Forward
    lanes: Lanes
    cache: KVCache
    rounds: Any = None


def _rounds(forward: Forward, backend: str, *, config: EngineConfig, **options: Any) -> Any:
    if backend == "cuda":
        from paceline.runner.rounds.cuda import CudaRounds

        return CudaRounds(forward, max_draft=config.max_draft, graphs=ON_GPU, **options)
    return WatchedRounds(forward, max_draft=config.max_draft, **options)


def build(
    backend: str = "toy",
    drafters: Mapping[str, Made] | None = None,
    *,
    forward: Forward | None = None,
    num_pages: int = 160,
    max_context: int = CONTEXT,
    eos_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] | None = None,
    on_device: Mapping[str, DeviceRig] | None = None,
    **options: Any,
) -> Rig:
    """Build an engine. The first drafter is the default. With `on_device`, steps run on a device that has these
    drafters, and `drafters` are those of the host."""
    config = EngineConfig.of(**{**LIMITS, **options})
    if forward is None:
        makers = [*(drafters or {}).values(), *(on_device or {}).values()]
        taps = sorted({tap for made in makers for tap in getattr(made, "taps", ())})
        forward = TARGET.forward(backend, num_pages=num_pages, taps=taps)
    lanes = Lanes(count=config.max_sequences, max_context=max_context, max_draft=config.max_draft)
    cache = KVCache(forward.kv, share_prefixes=config.prefix_cache)
    context = BuildContext(
        lanes=lanes,
        pool=cache.pool,
        vocab_size=forward.vocab_size,
        max_context=max_context,
        max_step_tokens=config.max_step_tokens,
        threads=1,
        target=forward,
    )
    guards = {
        name: Guard(make(context, backend), vocab_size=forward.vocab_size, timeout=config.drafter_timeout)
        for name, make in (drafters or {}).items()
    }
    rounds: Any = None
    if on_device is not None:
        by = device_drafters(on_device, backend, forward)
        rounds = _rounds(
            forward, backend, lanes=config.max_sequences, max_context=max_context, drafters=by, config=config
        )
        rounds.cache = cache
    engine = Engine(
        forward,
        config=config,
        lanes=lanes,
        cache=cache,
        max_context=max_context,
        eos_ids=eos_ids,
        drafters=guards,
        default_drafter=next(iter([*(on_device or ()), *guards]), None),
        tokenizer=tokenizer,
        rounds=rounds,
        **({} if clock is None else {"clock": clock}),
    )
    return Rig(engine=engine, forward=forward, lanes=lanes, cache=cache, rounds=rounds)
