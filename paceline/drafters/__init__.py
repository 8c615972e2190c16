"""Drafters: the public names for writing one, and one file or folder for each that comes with the package.

`docs/drafters.md` shows how to write a drafter. The names here are loaded on first use, so that importing the package
does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.draft import EMPTY, Draft
    from paceline.drafters.base import Ask, Drafter, Ended, FeatureDrafter, Seen, Verified
    from paceline.drafters.options import parse_options
    from paceline.drafters.recipe import BuildContext, DrafterKind, Recipe
    from paceline.drafters.registry import register
    from paceline.models.weights import Progress
    from paceline.runner.loading.models import ReadyModel
    from paceline.runner.rounds.protocol import DeviceDrafter, DraftingRound

__all__ = [
    "EMPTY",
    "Ask",
    "BuildContext",
    "DeviceDrafter",
    "Draft",
    "Drafter",
    "DrafterKind",
    "DraftingRound",
    "Ended",
    "FeatureDrafter",
    "Progress",
    "ReadyModel",
    "Recipe",
    "Seen",
    "Verified",
    "parse_options",
    "register",
]

_HOMES = {
    "paceline.draft": ("EMPTY", "Draft"),
    "paceline.drafters.base": ("Ask", "Drafter", "Ended", "FeatureDrafter", "Seen", "Verified"),
    "paceline.drafters.options": ("parse_options",),
    "paceline.drafters.recipe": ("BuildContext", "DrafterKind", "Recipe"),
    "paceline.drafters.registry": ("register",),
    "paceline.models.weights": ("Progress",),
    "paceline.runner.loading.models": ("ReadyModel",),
    "paceline.runner.rounds.protocol": ("DeviceDrafter", "DraftingRound"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'paceline.drafters' has no attribute {name!r}")
