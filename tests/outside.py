"""Rules from outside the package for the time of a test: registered by name, or installed as a distribution."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline import plugins, rules
from paceline.accept import AcceptRule, register, registry
from paceline.rules import Rule


@contextmanager
def registered(rule: AcceptRule, *, by: Callable[[AcceptRule], Rule] = register) -> Iterator[Rule]:
    try:
        yield by(rule)
    finally:
        forget(rule.name)


def install(directory: Path, module: str, source: str, offers: Mapping[str, str]) -> None:
    """Write a module and its metadata as an installer would: `offers` are entry points of the group paceline.rules."""
    (directory / f"{module}.py").write_text(source, encoding="utf-8")
    metadata = directory / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name} = {place}" for name, place in offers.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[paceline.rules]", *lines, ""]), encoding="utf-8")


@contextmanager
def installed(directory: Path, module: str, source: str, offers: Mapping[str, str]) -> Iterator[None]:
    """Install into this process."""
    install(directory, module, source, offers)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    plugins.load.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop(module, None)
        for name in offers:
            forget(name)


def forget(name: str) -> None:
    if name in rules._KNOWN and rules._KNOWN[name] not in rules.BUILT_IN:
        del rules._KNOWN[name]
    registry._registered.pop(name, None)
    registry._out_of_use.discard(name)
    plugins.load.cache_clear()
