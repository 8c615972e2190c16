"""Speeds of formats: measured for any model from its headers, and never a reason for another format of the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.engine.assemble import read_target
from paceline.runner.forwards import measuring
from paceline.runner.loading import format_speed
from paceline.runner.loading.format_speed import FORMATS, format_times
from paceline.runner.loading.models import read_model
from tests.cli.tiny_model import write_model


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "MAX_WAITED", float("inf"))
    monkeypatch.setattr(measuring, "MAX_PASSES", measuring.MIN_PASSES)
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    return str(folder)


def test_every_format_is_timed_once(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = read_model(tiny, format="int8")
    times = format_times(ready, FORMATS)
    assert times is not None
    assert list(times) == list(FORMATS)
    assert all(seconds > 0 for seconds in times.values())
    monkeypatch.setattr(format_speed, "_trial", lambda config, weights: pytest.fail("measured again"))
    assert format_times(ready, FORMATS) == times


def test_few_layers_stand_for_all(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one layer the time of a pass is scaled by the bytes of the others."""
    ready = read_model(tiny, format="int8")
    layers = []
    monkeypatch.setattr(format_speed, "TRIAL_BYTES", 1)
    monkeypatch.setattr(
        format_speed, "_trial", lambda config, weights: layers.append(config.num_layers) or (lambda: None)
    )
    monkeypatch.setattr(measuring, "measure", lambda runs: dict.fromkeys(runs, 1.0))
    times = format_times(ready, FORMATS)
    assert layers == [1] * len(FORMATS)
    assert times is not None
    assert all(1.0 < seconds < ready.model.config.num_layers for seconds in times.values())


def test_no_stopwatch_chooses_the_target_s_format(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text depends on the format: only the file and --format decide on it."""
    monkeypatch.setattr(measuring, "measure", lambda runs: pytest.fail("measured"))
    for asked, used in (("auto", "fp32"), ("int8", "int8"), ("int4-all", "int4-all")):
        target = read_target(tiny, format=asked, config=EngineConfig())
        assert target.stored is not None
        assert target.stored.format == used
