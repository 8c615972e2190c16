from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import build_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The model of a family and the directory it was saved to."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(family: str) -> tuple[Any, Path]:
        if family not in made:
            model, path = build_tiny(family), tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            made[family] = model, path
        return made[family]

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
