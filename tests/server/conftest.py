from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from paceline.llm import LLM
from paceline.server import logs
from tests.server.api import Api, serving, tiny_llm


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("served"))


@pytest.fixture
def api(llm: LLM) -> Iterator[Api]:
    """A server that nobody else uses; the engine is shared and idle."""
    with serving(llm) as api:
        yield api


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The server's log, as JSON lines."""
    stream = io.StringIO()
    names = ("paceline", "uvicorn")
    before = [(logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names]
    logs.start_log(as_json=True, stream=stream)
    yield stream
    for name, (handlers, level) in zip(names, before, strict=True):
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).setLevel(level)
