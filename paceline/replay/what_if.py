"""From a loaded model and a schedule to the settings that are simulated: measured passes, a sampled run, drafts.

Every setting has one number of sequences; a speculative one also has one longest draft. The model is run once, with the
largest of both; what smaller limits do is up to the engine that is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.memory_share import share_memory
from paceline.llm import LLM
from paceline.prompts.files import read_prompts, spread
from paceline.replay.arrivals import Arrival, Schedule
from paceline.replay.drafts import Drafts, MeasuredDrafts, given_acceptance, recorded_acceptance
from paceline.replay.meter import measure_passes
from paceline.replay.paper import DrafterTraits
from paceline.replay.sample import Sampled, run_sample
from paceline.replay.simulate import Setting
from paceline.replay.step_times import StepTimes
from paceline.types import Request, SamplingParams

SAMPLE_TOKENS = 96  # longest answer of a sampled request
STAND_IN = "mt_bench"  # prompts that steps are timed with if the record has no texts
Rate = float | str | None  # --acceptance: a number, `record`, `sample`; None: by what the record has


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and drafts of the model on this machine."""

    times: StepTimes
    drafts: Drafts | None  # None: there is no drafter
    traits: DrafterTraits | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a simulation needs; nothing of it holds the model."""

    schedule: Schedule
    settings: Sequence[Setting]
    facts: Mapping[str, Any]  # for the record


@dataclass(frozen=True, slots=True)
class WhatIf:
    batches: Sequence[int]  # sequences that run at once
    drafts: Sequence[int]  # tokens of the longest draft
    acceptance: Rate = None
    sample: int = 12  # requests
    stream_interval: float = 0.02  # seconds
    seed: int = 0


def measure(
    llm: LLM, schedule: Schedule, asked: WhatIf, *, has_texts: bool, tick: Callable[[], None] = lambda: None
) -> Measured:
    """Measure passes, run the sample, and find out how drafts are accepted."""
    table = measure_passes(llm.engine.probes, tick=tick)
    chosen = spread(schedule.arrivals, count=asked.sample)
    sample = [_sampled(arrival) for arrival in chosen] if has_texts else _stand_ins(llm, asked.sample)
    times, rounds = run_sample(llm.engine, sample, table, tick=tick)
    traits = traits_of(llm)
    if traits is None:
        return Measured(times, None, None)
    drafts: Drafts
    if isinstance(asked.acceptance, float):
        drafts = given_acceptance(asked.acceptance, max_draft=traits.max_draft)
    elif asked.acceptance == "record" or (asked.acceptance is None and not has_texts):
        drafts = recorded_acceptance(schedule.arrivals, drafter=traits.name)
    else:
        drafts = MeasuredDrafts(rounds, schedule.arrivals)
    return Measured(times, drafts, traits)


def traits_of(llm: LLM) -> DrafterTraits | None:
    """Describe the drafter that requests get which name none."""
    guard = llm.engine.drafters.get(llm.engine.default_drafter or "")
    if guard is None:
        return None
    return DrafterTraits(guard.name, guard.max_draft, guard.ends_drafts, guard.weighs_cost)


def settings(llm: LLM, config: EngineConfig, measured: Measured, asked: WhatIf) -> list[Setting]:
    """Make the settings: for each number of sequences plain decoding, then each longest draft."""
    found = []
    recipes = list(llm.parts.drafters.values())
    for batch in asked.batches:
        for draft in (None, *(asked.drafts if measured.traits is not None else ())):
            own = replace(config, max_sequences=batch, max_draft=draft or config.max_draft)
            memory = share_memory(llm.parts.target, recipes if draft else [], own)
            found.append(
                Setting(
                    name=_name(measured.traits, draft, batch),
                    config=own,
                    num_pages=memory.num_pages,
                    max_context=llm.parts.memory.max_context,
                    times=measured.times,
                    drafter=measured.traits if draft else None,
                    drafts=measured.drafts if draft else None,
                    stream_interval=asked.stream_interval,
                    seed=asked.seed,
                )
            )
    return found


def _name(traits: DrafterTraits | None, draft: int | None, batch: int) -> str:
    what = "plain" if draft is None or traits is None else f"{traits.name} ≤{draft}"
    return f"{what} batch {batch}"


def _sampled(arrival: Arrival) -> Sampled:
    request, length = arrival.request, min(arrival.answer.length, SAMPLE_TOKENS)
    sampling = replace(
        request.sampling,
        n=1,
        max_tokens=length,
        min_tokens=min(request.sampling.min_tokens, length),
        ignore_eos=request.sampling.grammar is None,
        seed=arrival.number if request.sampling.seed is None else request.sampling.seed,
        logprobs=None,
        prompt_logprobs=None,
    )
    return Sampled(arrival.number, Request(id=f"sample/{arrival.number}", prompt=request.tokens, sampling=sampling))


def _stand_ins(llm: LLM, count: int) -> list[Sampled]:
    """Make requests of a shipped set: their drafts count for nothing, their steps take as long as any."""
    greedy = SamplingParams(temperature=0, max_tokens=SAMPLE_TOKENS, ignore_eos=True)
    prompts = read_prompts(STAND_IN, count=count)
    texts = [llm.encode_chat(prompt.messages) if llm.chat_template else llm.encode(prompt.text) for prompt in prompts]
    room = llm.parts.memory.max_context - SAMPLE_TOKENS
    return [
        Sampled(0, Request(id=f"stand-in/{i}", prompt=tokens[:room], sampling=greedy)) for i, tokens in enumerate(texts)
    ]
