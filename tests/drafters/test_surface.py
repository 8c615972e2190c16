"""The public surface of drafters: names, defaults, and what an import costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import paceline.drafters as surface
from paceline.drafters import Ask, Draft, Drafter, FeatureDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.registry import REGISTRY


def test_every_name_is_there() -> None:
    assert all(getattr(surface, name) is not None for name in surface.__all__)
    assert {name for names in surface._HOMES.values() for name in names} == {*surface.__all__}
    with pytest.raises(AttributeError, match=r"'paceline.drafters' has no attribute 'Speculator'"):
        _ = surface.Speculator  # type: ignore[attr-defined]


def test_an_import_does_not_wait_for_torch() -> None:
    code = "import sys, paceline.drafters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_old_names_are_the_same_objects() -> None:
    from paceline.drafters import base, registry

    assert (registry.Recipe, registry.BuildContext, registry.register) == (
        surface.Recipe,
        surface.BuildContext,
        surface.register,
    )
    assert (base.Drafter, base.Ask) == (surface.Drafter, surface.Ask)


class Least(Drafter):
    """All that a drafter must have."""

    name = "least"

    def propose(self, asks: list[Ask]) -> list[Draft]:  # type: ignore[override]  # as a user may write it
        return [Draft(tokens=(1,)) for _ in asks]


def test_a_name_and_propose_are_enough() -> None:
    least, tokens = Least(), np.array([1, 2], dtype=np.int32)
    least.start(0, 0, tokens)
    least.observe(0, tokens, 1)
    least.stop(0)
    assert (least.inline, least.ends_drafts, least.needs_prediction, least.taps) == (True, False, False, ())
    with pytest.raises(TypeError, match=r"abstract method .?propose"):
        Drafter()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="feed"):
        type("Half", (FeatureDrafter,), {"propose": Least.propose})()


def test_one_drafter_needs_a_prediction() -> None:
    assert PredictionDrafter.needs_prediction
    assert PredictionDrafter.name in REGISTRY
