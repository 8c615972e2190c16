from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import pytest

from paceline.train.data.answering import Crew, answer
from paceline.train.data.answers import AnswerStore
from paceline.train.options import Job, curriculum
from tests.train.toy_lesson import toy_job, write_prompts, write_target


class Lesson(Protocol):
    """Makes a job whose prompts have been answered already."""

    def __call__(self, out: Path, **options: object) -> Job: ...


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "toy")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", count=72)


@pytest.fixture(scope="session")
def lesson(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    job = toy_job(target, prompts, tmp_path_factory.mktemp("answered") / "out")
    store = AnswerStore.create(job.work / "answers", job.answers, curriculum(job).questions)
    answer(store, Crew(device="cpu", batch=16, workers=1, threads=1), lambda done, total: None)

    def make(out: Path, **options: object) -> Job:
        made = toy_job(target, prompts, out, **options)
        shutil.copytree(store.path, made.work / "answers")
        return made

    return make
