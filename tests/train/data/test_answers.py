"""Answers on disk, and the engine that makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import InvalidRequest, TrainingError
from paceline.llm import LLM
from paceline.train.data import answering, answers
from paceline.train.data.answering import Workers, answer
from paceline.train.data.answers import AnswerSettings, AnswerStore, Exchange, Question
from paceline.types import SamplingParams
from tests.train.toy_training import WORDS

WORKERS = Workers(device="cpu", batch=3, count=1, threads=1)
QUESTIONS = [Question("train", word, temperature=0.0 if i % 2 else 0.8) for i, word in enumerate(WORDS[:7])]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (answers, answering):
        monkeypatch.setattr(module, "SHARD_PROMPTS", 2)


def settings_for(target: Path, **options: object) -> AnswerSettings:
    settings = AnswerSettings(str(target), "auto", max_length=64, max_new=8, sampled=0.5, temperature=0.8, seed=3)
    return replace(settings, **options)


@pytest.mark.usefixtures("small_shards")
def test_answers_are_the_engines(tmp_path: Path, target: Path) -> None:
    """Greedy ones equal what the façade says; drawn ones differ from them."""
    store = AnswerStore.create(tmp_path / "a", settings_for(target), QUESTIONS)
    seen: list[tuple[int, int]] = []
    answer(store, WORKERS, lambda done, total: seen.append((done, total)))
    assert seen == [(i, 7) for i in range(1, 8)], "every prompt is told"
    exchanges = store.read()["train"]
    llm = LLM(str(target), max_context=64, threads=1)
    differ = 0
    for question, exchange in zip(QUESTIONS, exchanges, strict=True):
        prompt = llm.encode_chat([{"role": "user", "content": question.text}])
        plain = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))[0]
        assert tuple(exchange.tokens[: exchange.prompt]) == prompt
        same = exchange.tokens[exchange.prompt :].tolist() == plain.tokens
        assert same or question.temperature
        differ += not same
    assert differ


@pytest.mark.usefixtures("small_shards")
def test_only_what_is_missing_is_answered(tmp_path: Path, target: Path) -> None:
    store = AnswerStore.create(tmp_path / "a", settings_for(target), QUESTIONS)
    answer(store, WORKERS, lambda done, total: None)
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    kept = store.shard_path(0).stat().st_mtime_ns
    store.shard_path(2).unlink()
    again = AnswerStore.create(tmp_path / "a", settings_for(target), QUESTIONS)
    assert again.missing() == [2]
    answer(AnswerStore.open(again.path), WORKERS, lambda done, total: None)
    after = {path.name: path.read_bytes() for path in store.path.iterdir()}
    redone = store.shard_path(2).name  # its answers may differ: other neighbours round a float otherwise
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in after if name != redone)
    assert store.shard_path(0).stat().st_mtime_ns == kept
    assert again.missing() == []


@pytest.mark.usefixtures("small_shards")
def test_several_machines_share_the_shards(tmp_path: Path, target: Path) -> None:
    store = AnswerStore.create(tmp_path / "a", settings_for(target), QUESTIONS)
    answer(store, replace(WORKERS, part=1, parts=2), lambda done, total: None)
    assert store.missing() == [0, 2]


@pytest.mark.parametrize("change", [{"max_new": 9}, {"seed": 4}, {"temperature": 0.9}])
def test_answers_of_other_settings_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    AnswerStore.create(tmp_path / "a", settings_for(Path("t")), QUESTIONS)
    with pytest.raises(InvalidRequest, match=f"made with {next(iter(change))} = .*another --out"):
        AnswerStore.create(tmp_path / "a", settings_for(Path("t"), **change), QUESTIONS)


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    AnswerStore.create(tmp_path / "a", settings_for(Path("t")), QUESTIONS)
    with pytest.raises(InvalidRequest, match="made with prompts ="):
        AnswerStore.create(tmp_path / "a", settings_for(Path("t")), QUESTIONS[:-1])


def test_prompts_that_are_too_long_have_no_answer(tmp_path: Path, target: Path) -> None:
    questions = [Question("train", "word"), Question("train", "long " * 40)]
    store = AnswerStore.create(tmp_path / "a", settings_for(target), questions)
    answer(store, WORKERS, lambda done, total: None)
    assert [exchange.answer for exchange in store.read()["train"]] == [8]


def test_an_answer_without_a_second_token_teaches_nothing(tmp_path: Path) -> None:
    store = AnswerStore.create(tmp_path / "a", settings_for(Path("t")), QUESTIONS[:2])
    store.write(0, [Exchange(np.arange(5), 4), Exchange(np.arange(6), 4)])
    assert [len(exchange.tokens) for exchange in store.read()["train"]] == [6]


def test_a_worker_of_its_own_answers_the_same(tmp_path: Path, target: Path) -> None:
    store = AnswerStore.create(tmp_path / "a", settings_for(target), QUESTIONS)
    words = [str(store.path), "--device", "cpu", "--batch", "3", "--sharing", "1", "--shards", "0"]
    assert answering.main(words) == 0
    assert not store.missing()
    assert json.loads((store.path / "plan.json").read_text())["seed"] == 3


def test_a_worker_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = AnswerStore.create(tmp_path / "a", settings_for(Path("no-such-model")), QUESTIONS)
    words = [str(store.path), "--device", "cpu", "--batch", "3", "--sharing", "1", "--shards", "0"]
    assert answering.main(words) == 1
    assert "no model 'no-such-model'" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_worker_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """On a GPU answers come from other processes."""
    store = AnswerStore.create(tmp_path / "a", settings_for(Path("t")), QUESTIONS)
    codes = iter([f"import time; time.sleep({seconds}); raise SystemExit(7)", "import time; time.sleep(60)"])
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", next(codes)]))
        return started[-1]

    monkeypatch.setattr(answering, "_start", start)
    monkeypatch.setattr(answering, "POLL_SECONDS", 0.05)
    with pytest.raises(TrainingError, match=r"ended with status 7.*What was answered is kept"):
        answer(store, replace(WORKERS, device="cuda", count=2), lambda done, total: None)
    assert [process.wait() for process in started] == [7, -9]
