from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.models.hub.stand_in import StandIn, running

Serve = Callable[..., StandIn]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache home, and no settings of the hub."""
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setattr("paceline.models.hub.client.PAUSE_SECONDS", 0.0)
    return tmp_path


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a stand-in of the hub, to which HF_ENDPOINT leads."""
    with ExitStack() as stack:

        def serve(repositories: Mapping[str, Mapping[str, bytes]], **faults: Any) -> StandIn:
            started = stack.enter_context(running(StandIn(repositories, **faults)))
            monkeypatch.setenv("HF_ENDPOINT", started.url)
            return started

        yield serve
