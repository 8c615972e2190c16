"""Heads that come with the package, one folder for each target, and how a user names a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.drafters.options import parse_options
from paceline.errors import ModelNotFound, PacelineError, UnknownOption
from paceline.models.block_config import is_block
from paceline.models.directory import member, read_json
from paceline.models.resolve import resolve
from paceline.models.speculators_config import TYPE
from paceline.runner.loading.heads import FORMATS

SHIPPED = Path(__file__).parent
HEAD_OPTIONS: dict[str, Callable[[str], Any]] = {"format": str, "max_draft": int, "min_confidence": float}


def shipped_drafters(target: str) -> list[str]:
    """Name the drafters of a target that comes with a head, for users who ask for none."""
    if not _is_shipped(target):
        return []
    return [f"{'block' if holds_block(target) else 'eagle'}:{target}"]


def holds_block(name: str) -> bool:
    """Tell whether the head that a user names is a block drafter, by its config.json; False if there is none."""
    try:
        return is_block(read_json(member(head_directory(name), "config.json")))
    except PacelineError:
        return False  # whoever reads the head says what is wrong


def kind_of_head(name: str) -> str | None:
    """Name the kind of drafter that reads what a directory or a hub id holds, by its config.json; None: no head."""
    try:
        values = read_json(member(resolve(name), "config.json"))
    except PacelineError:
        return None
    if "medusa_num_heads" in values:
        return "medusa"
    if is_block(values):
        return "block"
    if values.get(TYPE) == "mtp":
        return "mtp"
    return "eagle" if "eagle" in f"{values.get('architectures')} {values.get(TYPE)}".lower() else None


def head_directory(name: str) -> Path:
    """Find the head that a user names: a directory, a hub id, or the name of a shipped one."""
    if _is_shipped(name):
        return SHIPPED / name
    path = resolve(name)
    if not path.is_dir():
        raise ModelNotFound(f"{name!r:.200} is a model's file, not a directory with a head")
    return path


def head_options(
    drafter: str, options: str, more: Mapping[str, Callable[[str], Any]]
) -> tuple[Path, str | None, dict[str, Any]]:
    """Read `NAME,option=value,…` of a drafter with a head: its directory, the format of its weights, other options."""
    name, _, rest = options.partition(",")
    format, given = options_of_head(drafter, rest, more)
    return head_directory(name), format, given


def options_of_head(
    drafter: str, options: str, more: Mapping[str, Callable[[str], Any]]
) -> tuple[str | None, dict[str, Any]]:
    """Read `option=value,…` of a drafter with a head: the format of its weights, None if it is not given, and other
    options."""
    given = parse_options(drafter, options, {**HEAD_OPTIONS, **more})
    format = given.pop("format", None)
    if format not in (None, *FORMATS):
        raise UnknownOption(f"format of the {drafter} drafter", format, FORMATS)
    return format, given


def _is_shipped(name: str) -> bool:
    return name.isidentifier() and (SHIPPED / name / "config.json").is_file()
