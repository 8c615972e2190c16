from __future__ import annotations

import pytest

from paceline.models import shapes
from tests.tiny_models import TARGET


@pytest.fixture(autouse=True)
def _a_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the shape "small" known."""
    monkeypatch.setitem(shapes.SHAPES, "small", TARGET.config)
