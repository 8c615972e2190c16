"""Sources of results: each file of docs/results names its command, its commit and its machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.models.resolve import served_name

Record = dict[str, Any]
Paths = Sequence[Path]


def load(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def source(path: Path, record: Mapping[str, Any]) -> str:
    machine = record.get("machine") or record.get("client_machine") or {}
    command = record["command"]
    said = command if isinstance(command, str) else ", ".join(f"{k} {v}" for k, v in command.items() if v is not None)
    return f"- `{path.name}`: `{said}`; commit {machine['commit']}; {machine_text(machine)}"


def machine_text(machine: Mapping[str, Any]) -> str:
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{where}, Python {machine['python']}, torch {machine['torch']}"


def with_sources(table: str, paths: Iterable[Path]) -> str:
    return "\n".join([table, "", *(source(path, load(path)) for path in paths)])


def shown(words: str) -> str:
    """A target or drafter without the folders of this machine."""
    kind, colon, name = words.rpartition(":")
    return f"{kind}{colon}{served_name(name)}" if name.endswith(".gguf") else words
