"""Count calls of Python functions: a measure of the host's work that no busy machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


def count_calls(run: Callable[[], Result], *, of: Sequence[str] = ("",)) -> tuple[int, Result]:
    """Count the calls that `run` makes of functions in files whose path contains one of `of`; return its result too."""
    count = 0

    def look(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and any(part in frame.f_code.co_filename for part in of)

    sys.setprofile(look)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return count, result
