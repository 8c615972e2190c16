from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import pytest

from paceline.train.data.answering import Workers, answer
from paceline.train.data.answers import AnswerStore
from paceline.train.data.split import split_prompts
from paceline.train.options import TrainOptions
from tests.train.toy_training import toy_options, write_prompts, write_target


class MakeOptions(Protocol):
    """Makes options of a training whose prompts have been answered already."""

    def __call__(self, out: Path, **changes: object) -> TrainOptions: ...


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "toy")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", count=72)


@pytest.fixture(scope="session")
def answered(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeOptions:
    options = toy_options(target, prompts, tmp_path_factory.mktemp("answered") / "out")
    store = AnswerStore.create(options.work / "answers", options.answer_settings, split_prompts(options).questions)
    answer(store, Workers(device="cpu", batch=16, count=1, threads=1), lambda done, total: None)

    def make(out: Path, **changes: object) -> TrainOptions:
        made = toy_options(target, prompts, out, **changes)
        shutil.copytree(store.path, made.work / "answers")
        return made

    return make
