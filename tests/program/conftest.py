"""A tiny model for programs, and the promise that a run leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paceline.llm import LLM
from tests.server.api import tiny_llm

NAMES = ("program", "engine", "encoding", "remote")  # of threads that programs start


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def _nothing_stays(llm: LLM) -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith(NAMES):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} still runs"
    assert llm.stepped_by is None
    assert not llm.engine.has_work
    llm.engine.check()
    assert llm.engine._cache.pool.held == 0
