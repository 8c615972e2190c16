from __future__ import annotations

import pytest

from tests.cli.tiny_model import write_model
from tests.trained_heads import Text, answered


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The text of a tiny target that heads are fitted to."""
    return answered(write_model(tmp_path_factory.mktemp("target")))
