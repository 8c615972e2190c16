"""Replay a schedule for real: every request is sent to a server when it is due, by the load generator of `bench serve`.

Prompts go out as token ids, with their sampling parameters. An answer is as long as the recorded one: `ignore_eos`, and
its length as `max_tokens`. So a server's text may differ, and its work does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.arrivals import Load
from paceline.bench.client import RequestOutcome
from paceline.bench.serve import INVOCATION, Arm, Block, LoadRun, send_all
from paceline.bench.workloads import BenchPrompt
from paceline.errors import InvalidRequest
from paceline.replay.arrivals import Arrival
from paceline.types import SamplingParams

SENT = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias",
)  # fmt: skip  # sampling parameters that change which tokens come, but not how many


async def replay_real(
    arm: Arm, arrivals: Sequence[Arrival], run: LoadRun, *, tick: Callable[[RequestOutcome], None]
) -> None:
    """Send all requests into a block of `run`, which keeps what there is if this is interrupted."""
    due = [(arrival.due, prompt_of(arrival)) for arrival in arrivals]
    fields = {"model": arm.model, "ignore_eos": True, "cache_salt": f"{INVOCATION}/replay", **arm.fields}
    before = await arm.client.counters()
    block = Block()
    run.blocks.append(block)
    began = time.perf_counter()
    try:
        await send_all(run, block, due, fields, began, tick)
    finally:
        block.seconds = time.perf_counter() - began
    after = await arm.client.counters()
    if before is not None and after is not None:
        run.counters = after - before


def real_run(arm: Arm) -> LoadRun:
    return LoadRun(arm, Load(), temperature=0.0)


def prompt_of(arrival: Arrival) -> BenchPrompt:
    request = arrival.request
    if not request.tokens:
        raise InvalidRequest(f"{request.where}: was recorded without its text, which --real sends: record with text")
    return BenchPrompt(
        arrival.id,
        "replay",
        tokens=request.tokens,
        max_tokens=arrival.answer.length,
        seed=arrival.number if request.sampling.seed is None else request.sampling.seed,
        fields=_sampling(request.sampling),
    )


def _sampling(sampling: SamplingParams) -> Mapping[str, Any]:
    usual = SamplingParams()
    sent = {name: getattr(sampling, name) for name in SENT}
    changed = {name: value for name, value in sent.items() if value != getattr(usual, name)}
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, **changed}
