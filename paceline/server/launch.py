"""What a server is started with: the options of its model, its engine and itself, by name, and what is made of them.

`gather` finds the values, on a command line or for a replica of a cluster. Imports torch only where it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.checks import check_integer
from paceline.config import EngineConfig
from paceline.rules import Rule
from paceline.server.settings import HINTS, Settings

if TYPE_CHECKING:
    from paceline.llm import LLM

LOADING: Mapping[str, Any] = {
    "model": str,
    "drafter": tuple[str, ...],
    "format": str,
    "device": str,
    "threads": int | None,
}
DEFAULTS = {"model": "smollm2", "format": "auto", "device": "auto"}
OPTIONS: Mapping[str, Any] = {**LOADING, **get_type_hints(EngineConfig), **HINTS}  # name → type
ENGINE = tuple(field.name for field in fields(EngineConfig))


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Make the server's settings. Raises InvalidRequest for a rule that the device cannot run."""
    from paceline.runner.loading.models import choose_device

    settings = Settings.of(**{name: value for name, value in given.items() if name in HINTS})
    device = choose_device(given["device"])
    for rule in settings.allowed_rules:
        Rule(rule).check_device(device)
    return settings


def load_model(given: Mapping[str, Any], progress: Callable[[int, int], None]) -> LLM:
    """Load the model with its drafters. Beside options `given` may have `cores`, which a cluster reserves."""
    from paceline.drafters.registry import asked_drafters
    from paceline.llm import LLM
    from paceline.runner.loading.models import choose_device

    if given.get("threads") is not None:
        check_integer("threads", given["threads"], 1, 4096)
    device = choose_device(given["device"])
    return LLM(
        given["model"],
        drafter=asked_drafters(words(given.get("drafter")), given["model"], device),
        format=given["format"],
        device=device,
        threads=given.get("threads"),
        cores=given.get("cores"),
        progress=progress,
        recording=progress,
        **{name: given[name] for name in ENGINE if given.get(name) is not None},
    )


def words(drafters: Sequence[str] | None) -> list[str] | None:
    """Write an empty list, which only a file can give, as the word none."""
    return None if drafters is None else [*drafters] or ["none"]
