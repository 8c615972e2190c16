"""The file of a grid: JSON lines, the setup first and then one place each, appended as they are measured.

A file continues only with the setup that began it. A line that a crash has torn, at the end, is cut off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, StorageError

Record = dict[str, Any]


def resume(path: Path, setup: Record) -> list[Record]:
    """Return the places that a file has, and make it ready for more. Raises InvalidRequest for another setup."""
    lines = _whole_lines(path)
    if not lines:
        append(path, {"benchmark": "grid", "setup": setup})
        return []
    began = _parsed(path, lines[0]).get("setup")
    if began is None:
        raise InvalidRequest(f"{path} is no file of --grid: give the path of one, or of a new file")
    _check(path, began, json.loads(json.dumps(setup)))
    return [_parsed(path, line) for line in lines[1:]]


def append(path: Path, record: Record) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); choose another place") from error


def _whole_lines(path: Path) -> list[str]:
    """Read all complete lines, and cut off what follows them."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def _parsed(path: Path, line: str) -> Record:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} is no file of --grid: give the path of one, or of a new file")
    return found


def _check(path: Path, began: Record, setup: Record) -> None:
    others = [
        f"{name} {began.get(name)!r:.80}, now {setup.get(name)!r:.80}"
        for name in sorted({*began, *setup})
        if began.get(name) != setup.get(name)
    ]
    if others:
        raise InvalidRequest(
            f"{path} was begun with another setup ({'; '.join(others)}): repeat that one, or save to a new file"
        )
