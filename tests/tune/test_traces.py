"""Traces of answers hold for every batch size, and replayed lookups draft what an engine's lookups draft."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.bench.offline import Cell
from paceline.bench.workloads import BenchPrompt
from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.guard import Guard
from paceline.errors import EngineDead
from paceline.sampling.sampler import Sampler
from paceline.tune.lookups import replay_lookup
from paceline.tune.traces import Recorded, Round, Step, Trace, recorded, trace
from paceline.types import Request, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import RIGS
from tests.runs import prompt
from tests.tiny_models import VOCAB

TOKENS = [prompt(6 + 3 * i, seed=i, repeat=i % 2 == 0) for i in range(5)]
PROMPTS = [BenchPrompt(str(i), "toy", max_tokens=14 + i, seed=i) for i in range(5)]
LOOKUPS = {"ngram": RIGS["ngram"]["ngram"], "suffix": RIGS["suffix"]["suffix"]}


def fixed(drafter: str, draft: int, batch: int, temperature: float = 0.0) -> Cell:
    return Cell(batch, temperature, Speculation(drafter=drafter, max_draft=draft), drafter, fixed=True)


def traced(rig: Rig, cell: Cell) -> list[Trace]:
    size = cell.batch
    return [trace(rig.engine, cell, PROMPTS[i : i + size], TOKENS[i : i + size]) for i in range(0, len(PROMPTS), size)]


def rounds_of(rig: Rig, cell: Cell) -> list[list[Round]]:
    return [rounds for each in traced(rig, cell) for rounds in each.rounds]


def plain_answers(rig: Rig, temperature: float = 0.0) -> list[Recorded]:
    answers = [answer for each in traced(rig, Cell(2, temperature)) for answer in each.answers]
    return [recorded(*each) for each in zip(PROMPTS, TOKENS, answers, strict=True)]


def samplers(rig: Rig, temperature: float = 0.0) -> list[Sampler]:
    params = [SamplingParams(temperature=temperature, max_tokens=p.max_tokens, seed=p.seed) for p in PROMPTS]
    requests = [Request(id="x", prompt=t, sampling=p) for t, p in zip(TOKENS, params, strict=True)]
    return [rig.engine.probes.admission.sequences(request, now=0.0)[0].sampler for request in requests]


@pytest.mark.unwatched
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_replayed_lookup_drafts_what_it_drafts_in_an_engine(name: str, batch: int, temperature: float) -> None:
    """Tokens and drafted nodes of every round, past answers and trust included."""
    answers = plain_answers(build(), temperature)
    for draft in (1, 3, 6):
        rig, other = (build(drafters={name: LOOKUPS[name]}, max_step_tokens=64) for _ in range(2))
        made = rounds_of(rig, fixed(name, draft, batch, temperature))
        guard = other.engine.drafters[name]
        texts = samplers(other, temperature)
        found = replay_lookup(guard, answers, texts, draft=draft, batch=batch, salt="replay")
        assert found == made
        assert sum(r.drafted for each in found for r in each) > 0
        assert [1 + sum(r.tokens for r in each) for each in found] == [len(each.answer) for each in answers]


@pytest.mark.parametrize(("kind", "name"), [("eagle", "eagle"), ("model", "noisy")])
def test_rounds_do_not_depend_on_the_batch(kind: str, name: str) -> None:
    drafters = {name: RIGS[kind][name]}
    one, many = (rounds_of(build("torch", drafters, max_step_tokens=128), fixed(name, 4, batch)) for batch in (1, 5))
    assert one == many
    assert sum(r.drafted for each in one for r in each) > 0


def test_steps_without_prompts_are_timed() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    rig = build(drafters={"ngram": LOOKUPS["ngram"]})
    made = trace(rig.engine, fixed("ngram", 3, 3), PROMPTS[:3], TOKENS[:3], clock=clock)
    assert {step.seconds for step in made.steps} == {0.5}
    assert made.steps[0].sequences == 3
    late = sum(step.rows for step in made.steps)
    rounds = [r for each in made.rounds for r in each]
    assert 0 <= sum(1 + r.drafted for r in rounds) - late < len(rounds)  # early tokens come beside prompts
    plain = trace(rig.engine, Cell(1, 0.0), PROMPTS[:1], TOKENS[:1], number=1)
    assert plain.rounds == [[Round(1, 0)] * 13]
    assert [step._replace(seconds=0.0) for step in plain.steps] == [Step(1, 1, 0.0)] * 13


class Raising(Drafter):
    name = "raising"

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        raise RuntimeError("no")


def test_a_drafter_that_fails_is_out() -> None:
    answers = plain_answers(build())
    guard = Guard(Raising(), vocab_size=VOCAB, timeout=1.0)
    found = replay_lookup(guard, answers, samplers(build()), draft=3, batch=2, salt="x")
    assert guard.out is not None
    assert all(r == Round(1, 0) for each in found for r in each)


def test_a_dead_engine_is_an_error() -> None:
    rig = build()
    rig.engine._stepper.launch = None  # type: ignore[assignment]
    with pytest.raises(EngineDead, match="in the middle of the measurement"):
        trace(rig.engine, Cell(1, 0.0), PROMPTS[:1], TOKENS[:1])
