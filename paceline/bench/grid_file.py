"""The file of a long measurement: JSON lines, the setup first and then one record each, appended as they are measured.

A file continues only with the setup that began it. A line that a crash has torn, at the end, is cut off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, StorageError

Record = dict[str, Any]


def resume(path: Path, setup: Record, *, of: str = "grid") -> list[Record]:
    """Return the records that a file has, and make it ready for more. `of`: the kind of measurement.

    Raises InvalidRequest for another setup or kind."""
    lines = _whole_lines(path)
    if not lines:
        append(path, {"benchmark": of, "setup": setup})
        return []
    first = _parsed(path, lines[0], of=of)
    if first.get("benchmark") != of or "setup" not in first:
        raise _another_kind(path, of)
    _check(path, first["setup"], json.loads(json.dumps(setup)))
    return [_parsed(path, line, of=of) for line in lines[1:]]


def append(path: Path, record: Record) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); choose another place") from error


def _whole_lines(path: Path) -> list[str]:
    """Read all complete lines, and cut off what follows them."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read ({error}); choose another place") from error
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def _parsed(path: Path, line: str, *, of: str) -> Record:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _another_kind(path, of)
    return found


def _another_kind(path: Path, of: str) -> InvalidRequest:
    made_by = {"grid": "--grid", "drafters": "`python -m peers.drafters`"}.get(of, f"`paceline {of}`")
    return InvalidRequest(f"{path} is no file of {made_by}: give the path of one, or of a new file")


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
