from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.parallel.split_models import write_tiny
from tests.tiny_models import TARGET


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as files."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), TARGET.config, TARGET.weights)
