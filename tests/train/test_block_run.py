"""Whole trainings of toy block drafters: how good they become, and that the engine drafts what training measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.train.data.answers import HELD_OUT, AnswerStore
from paceline.train.loop.score import Score
from paceline.train.measure import measure
from paceline.train.options import EvalOptions, TrainOptions
from paceline.train.run import train
from paceline.train.storage import read_tensors
from paceline.types import OFF, SamplingParams, Speculation
from tests.train.conftest import MakeOptions
from tests.train.toy_training import toy_options, write_prompts

BLOCK: dict[str, Any] = {"kind": "block", "layers": 2, "block": 4, "taps": 2, "draft": 3, "max_steps": 60}
SHORT = {"max_steps": 6, "evaluations": 2}


@dataclass(frozen=True)
class Trained:
    options: TrainOptions
    scores: dict[str, Score]
    said: list[str]


def run(options: TrainOptions) -> Trained:
    said: list[str] = []
    return Trained(options, train(options, said.append), said)


@pytest.fixture(scope="module", params=[0, 16], ids=["dflash", "dspark"])
def trained(request: pytest.FixtureRequest, answered: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("run") / "block"
    return run(answered(out, **BLOCK, markov=request.param))


def test_it_learns(trained: Trained) -> None:
    """The toy target says 16 letters: a guess at random is right once in 16 times."""
    assert min(trained.scores[HELD_OUT].by_position) > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("markov", [0, 16])
def test_most_tokens_are_right_after_a_longer_training(markov: int, target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", count=500)
    longer = {**BLOCK, "markov": markov, "max_steps": 400, "held_out": 20, "sampled": 0.5}
    score = run(toy_options(target, prompts, tmp_path / "out", **longer)).scores[HELD_OUT]
    assert score.by_position[0] > 0.55
    assert score.tokens_per_round > 1.9


def test_the_engine_drafts_what_training_measured(trained: Trained) -> None:
    """In rounds over the held-out prompts, with the text unchanged."""
    options = trained.options
    always: dict[str, Any] = {"max_draft": 3, "fixed_draft": True, "max_draft_batch": 64}
    drafter = f"block:{options.out},min_confidence=0,max_draft=3"
    llm = LLM(options.target.model, drafter=drafter, format="fp32", max_context=128, threads=1, **always)
    asked = [one.text for one in AnswerStore.open(options.work / "answers").questions if one.set == HELD_OUT]
    encoded = [llm.encode_chat([{"role": "user", "content": text}]) for text in asked]
    params = SamplingParams(temperature=0, max_tokens=40)
    found = llm.generate(encoded, params, speculation=Speculation(drafter="block"))
    assert [one.tokens for one in found] == [one.tokens for one in llm.generate(encoded, params, speculation=OFF)]
    engine = 1 + sum(one.stats.accepted for one in found) / sum(one.stats.rounds for one in found)
    assert trained.scores[HELD_OUT].tokens_per_round == pytest.approx(engine, rel=0.03)


def test_a_directory_can_be_measured_later(trained: Trained, tmp_path: Path) -> None:
    asked = [one.text for one in AnswerStore.open(trained.options.work / "answers").questions if one.set == HELD_OUT]
    (tmp_path / "again.txt").write_text("\n".join(asked))
    evals = {"again": tmp_path / "again.txt"}
    found = measure(EvalOptions(trained.options.target, trained.options.out, evals, draft=3), lambda text: None)
    assert found["again"].tokens_per_round == pytest.approx(trained.scores[HELD_OUT].tokens_per_round, rel=0.03)


def test_the_card_names_the_drafter(trained: Trained) -> None:
    card = (trained.options.out / "README.md").read_text()
    assert "--drafter block:PATH" in card
    assert "A drafter of kind `block`" in card


class Interrupted(Exception):
    pass


def test_a_training_goes_on_as_if_it_had_not_stopped(answered: MakeOptions, tmp_path: Path) -> None:
    """After an interruption between two evaluations the weights become the same."""
    options = {**BLOCK, **SHORT, "markov": 8, "packing": "int4"}
    whole, parts = answered(tmp_path / "whole" / "out", **options), answered(tmp_path / "parts" / "out", **options)
    run(whole)

    def stop(text: str) -> None:
        if text.startswith("held-out: "):
            raise Interrupted

    with pytest.raises(Interrupted):
        train(parts, stop)
    (said := []).extend(run(parts).said)
    ended = [read_tensors(each.work / "checkpoint.safetensors")[0] for each in (whole, parts)]
    names = [name for name in ended[0] if name.startswith("param.")]
    assert len(names) > 20
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in names), said
    with pytest.raises(InvalidRequest, match="a training with markov = 8, not 16"):
        train(replace(parts, markov=16), lambda text: None)
