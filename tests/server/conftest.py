from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.llm import LLM
from tests.server.api import Api, serving, tiny_llm


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("served"))


@pytest.fixture
def api(llm: LLM) -> Iterator[Api]:
    """A server that nobody else uses; the engine is shared and idle."""
    with serving(llm) as api:
        yield api
