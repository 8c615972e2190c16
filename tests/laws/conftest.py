from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    """Hide the laws from coverage: they run the same lines thousands of times, at twice the time under its eyes.

    What is covered is shown by the tests of each part.
    """
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)
