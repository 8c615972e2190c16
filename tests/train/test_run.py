"""Whole trainings of toy drafters: how good they become, what they leave behind, and what cannot stop them."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest, StorageError
from paceline.llm import LLM, Answer
from paceline.train import storage
from paceline.train.data.answers import HELD_OUT, TRAIN, AnswerStore
from paceline.train.data.split import split_prompts
from paceline.train.loop import checkpoint
from paceline.train.loop.checkpoint import Progress
from paceline.train.loop.score import Score
from paceline.train.measure import measure
from paceline.train.options import EvalOptions, TrainOptions
from paceline.train.phases import Unseen
from paceline.train.run import train
from paceline.train.storage import read_tensors
from paceline.types import SamplingParams, Speculation
from tests.train.conftest import MakeOptions
from tests.train.toy_training import toy_options, write_prompts

SHORT = {"max_steps": 6, "evaluations": 2}


@dataclass(frozen=True)
class Trained:
    options: TrainOptions
    scores: dict[str, Score]
    said: list[str]


def run(options: TrainOptions) -> Trained:
    said: list[str] = []
    return Trained(options, train(options, said.append), said)


@pytest.fixture(scope="module")
def trained(answered: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(answered(tmp_path_factory.mktemp("run") / "eagle"))


@functools.cache
def in_engine(target: str, work: Path, drafter: str, temperature: float) -> list[Answer]:
    """The engine's answers to the held-out prompts, every draft as long as it may be."""
    always: dict[str, Any] = {"max_draft": 4, "fixed_draft": True, "max_draft_batch": 64}
    llm = LLM(target, drafter=drafter, format="fp32", max_context=128, threads=1, **always)
    questions = [one.text for one in AnswerStore.open(work / "answers").questions if one.set == HELD_OUT]
    encoded = [llm.encode_chat([{"role": "user", "content": text}]) for text in questions]
    alone = Speculation(drafter=drafter.partition(":")[0])
    return llm.generate(encoded, SamplingParams(temperature=temperature, max_tokens=40, seed=3), speculation=alone)


# ── what comes of it ──


@pytest.mark.unwatched
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_head_beats_lookup_in_the_engine(trained: Trained, temperature: float) -> None:
    """On prompts that it has not seen, with the text unchanged."""
    options = trained.options
    head = in_engine(options.target.model, options.work, f"eagle:{options.out},min_confidence=0", temperature)
    lookup = in_engine(options.target.model, options.work, "ngram", temperature)
    assert [one.tokens for one in head] == [one.tokens for one in lookup]
    passes = [sum(len(one.tokens) - one.stats.accepted for one in answers) for answers in (head, lookup)]
    assert passes[0] < 0.95 * passes[1], "passes of the target for the same text"


def test_the_evaluation_counts_as_the_engine_does(trained: Trained) -> None:
    """All but the last step of an answer, where the engine has no room for a draft."""
    options = trained.options
    found = in_engine(options.target.model, options.work, f"eagle:{options.out},min_confidence=0", 0.0)
    engine = 1 + sum(one.stats.accepted for one in found) / sum(one.stats.rounds for one in found)
    assert trained.scores[HELD_OUT].tokens_per_round == pytest.approx(engine, rel=0.03)


def test_the_files_are_a_drafter_with_its_card(trained: Trained) -> None:
    out = trained.options.out
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "README.md", "curves.svg"}
    card = (out / "README.md").read_text()
    score = trained.scores[HELD_OUT]
    assert f"| held-out | 12 | {score.tokens_per_round:.2f} | {score.by_position[0]:.1%} |" in card
    assert "| toy | CC0-1.0 | 60 |" in card
    assert "of what the target says" in card
    drawing = ElementTree.fromstring((out / "curves.svg").read_text())
    lines = [element.get("points", "") for element in drawing.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2
    assert len(lines[1].split()) == 3, "one point an evaluation"


def test_what_is_said_on_the_way(trained: Trained) -> None:
    said = "\n".join(trained.said)
    assert "60 prompts to train on, 12 held out, 0 left out" in said
    assert "60 answers with 2400 tokens" in said
    assert "100% step 50" in said
    assert "tok/s" in said
    assert said.count("held-out: ") == 4  # three on the way, one at the end


def test_a_finished_training_is_only_measured_again(trained: Trained) -> None:
    again = run(trained.options)
    assert again.scores == trained.scores
    assert not any("step 1 " in line for line in again.said)


def test_a_directory_can_be_measured_later(trained: Trained, tmp_path: Path) -> None:
    """In the precision of its file, on any set."""
    questions = [
        one.text for one in AnswerStore.open(trained.options.work / "answers").questions if one.set == HELD_OUT
    ]
    (tmp_path / "again.txt").write_text("\n".join(questions))
    options = EvalOptions(trained.options.target, trained.options.out, evals={"again": tmp_path / "again.txt"})
    found = measure(options, lambda text: None)
    assert found["again"].tokens_per_round == pytest.approx(trained.scores[HELD_OUT].tokens_per_round, rel=0.03)
    assert [path.name for path in tmp_path.iterdir()] == ["again.txt"]


# ── interruptions ──


def params(options: TrainOptions) -> dict[str, torch.Tensor]:
    tensors, _ = read_tensors(options.work / "checkpoint.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("param.")}


COMMAND = """
import sys
from pathlib import Path
from paceline.train.loop import trainer
from paceline.train.run import train
from tests.train.toy_training import toy_options
trainer.SAVE_SECONDS = 0.0  # after every step
target, prompts, out = map(Path, sys.argv[1:])
train(toy_options(target, prompts, out, max_steps=100000, evaluations=1), lambda text: None)
"""


def test_kill_and_go_on(answered: MakeOptions, tmp_path: Path) -> None:
    """Killed at any moment, here while it saves after every step: a checkpoint is there, and whole."""
    options = answered(tmp_path / "out", evaluations=1, max_steps=100000)
    words = [sys.executable, "-c", COMMAND, options.target.model, str(options.prompts), str(options.out)]
    process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while _step(options) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = _step(options)
    assert reached >= 3
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if "going on" in text:
            raise _Stopped

    with pytest.raises(_Stopped):
        train(options, stop)
    assert f"going on from step {reached}," in said[-1]
    with pytest.raises(InvalidRequest, match="a training with max_steps = 100000, not 50"):
        train(replace(options, max_steps=50), lambda text: None)


def _step(options: TrainOptions) -> int:
    path = options.work / "checkpoint.safetensors"
    return checkpoint.load(path, {})[0].step if path.exists() else 0


class _Stopped(Exception):
    pass


def test_an_interrupted_training_ends_where_one_in_one_piece_does(
    answered: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answered(tmp_path / "whole", **SHORT)
    run(whole)
    parts = answered(tmp_path / "parts", **SHORT)
    save = checkpoint.save

    def stop(path: Path, progress: Progress, *rest: object) -> None:
        save(path, progress, *rest)
        if progress.step == 3:
            raise _Stopped

    monkeypatch.setattr(checkpoint, "save", stop)
    with pytest.raises(_Stopped):
        run(parts)
    monkeypatch.setattr(checkpoint, "save", save)
    said = run(parts).said
    assert any("going on from step 3" in line for line in said)
    one, other = params(whole), params(parts)
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_a_full_disk_loses_nothing(answered: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = answered(tmp_path / "out", **SHORT)
    fsync, written = os.fsync, [0]

    def full(descriptor: int) -> None:
        written[0] += 1
        if written[0] > 5:  # the four files of the first drafter, its checkpoint: the next one finds no room
            raise OSError(errno.ENOSPC, "full")
        fsync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        run(options)
    monkeypatch.setattr(storage.os, "fsync", fsync)
    said = run(options).said
    assert any("going on from step 3" in line for line in said)
    assert (options.out / "model.safetensors").exists()


# ── what cannot be trained ──


def test_prompts_like_those_measured_on_are_left_out(target: Path, tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen"
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("a", "b", "c", f"x {long}")))
    (tmp_path / "e.jsonl").write_text(f'{{"turns": ["first", "So: {long}."]}}\n')
    options = toy_options(target, tmp_path / "p.jsonl", tmp_path / "out", held_out=1)
    assert split_prompts(options).left_out == 0
    for excluding in (
        replace(options, excludes=[tmp_path / "e.jsonl"]),
        replace(options, evals={"e": tmp_path / "e.jsonl"}),
    ):
        plan = split_prompts(excluding)
        assert plan.left_out == 1
        assert len(plan.trained) == 2
        assert not any(long in prompt.text for prompt in plan.trained)


def test_prompts_that_are_answered_several_times(target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", count=20)
    few = {"held_out": 4, "max_new": 16, "max_steps": 2, "evaluations": 1}
    options = toy_options(target, prompts, tmp_path / "out", sampled=0.5, samples=3, **few)
    plan, once = split_prompts(options), split_prompts(replace(options, samples=1))
    assert plan.questions[: len(once.questions)] == once.questions
    again = plan.questions[len(once.questions) :]
    assert [question.text for question in again] == 2 * [prompt.text for prompt in plan.trained]
    assert {question.temperature for question in again} == {options.temperature}
    assert plan.sampled == (once.sampled + 2) / 3
    run(options)
    answers = AnswerStore.open(options.work / "answers").read()[TRAIN]
    texts = {exchange.tokens[: exchange.prompt].tobytes() for exchange in answers}
    assert len(answers) == 3 * len(plan.trained)
    assert len({exchange.tokens.tobytes() for exchange in answers}) > 2 * len(texts), "drawn anew each time"
    assert f"{len(answers)} answers" in (options.out / "README.md").read_text()


def test_what_it_aims_at_changes_what_is_learnt(answered: MakeOptions, tmp_path: Path) -> None:
    heads = []
    for aim in ("likelihood", "overlap"):
        options = answered(tmp_path / aim, aim=aim, max_steps=2, evaluations=1)
        run(options)
        heads.append(read_tensors(options.out / "model.safetensors")[0]["lm_head.weight"])
    assert not torch.equal(*heads)


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (3, 1), (48, 12), (1024, 256), (5000, 256)])
def test_few_prompts_have_few_held_out(count: int, held_out: int, tmp_path: Path) -> None:
    options = toy_options(tmp_path, write_prompts(tmp_path / "p.jsonl", count=count), tmp_path / "out", held_out=None)
    split = split_prompts(options)
    assert (split.held_out, len(split.trained)) == (held_out, count - held_out)


def test_every_phase_is_told_with_its_counts(target: Path, tmp_path: Path) -> None:
    """Also with four prompts, of which one is held out."""
    told: list[tuple[str, int]] = []

    class Noted(Unseen):
        def phase(self, doing: str, *, unit: str = "", total: int = 0, done: int = 0) -> None:
            told.append((doing, total))

    prompts = write_prompts(tmp_path / "p.jsonl", count=4)
    few = {"held_out": None, "max_new": 16, "max_steps": 2, "evaluations": 1}
    options = toy_options(target, prompts, tmp_path / "out", **few)
    train(options, lambda text: None, Noted())
    assert told == [
        ("reading prompts", 0),
        ("answering prompts", 4),
        ("loading the target", 0),
        ("reading hidden states", 0),
        ("training", 2),
        ("measuring after step 2, on 1 prompts", 0),
        ("training", 2),
        ("fitting the shortlist", 0),
        ("measuring", 1),
        (f"writing {options.out}", 0),
    ]
    assert (options.out / "README.md").exists()


def test_too_few_prompts_are_said(target: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"72 prompts can be used .* 72 of them would be held out"):
        run(toy_options(target, prompts, tmp_path / "out", held_out=72))
    assert not (tmp_path / "out.work").exists()


def test_prompts_that_all_are_too_long_are_said(target: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="raise --max-length"):
        run(toy_options(target, prompts, tmp_path / "out", max_length=16))
