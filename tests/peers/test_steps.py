"""The script runs on a tiny model; what it says of time is not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from peers import steps
from tests.cli.tiny_model import write_model


def test_rows_and_batches_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "PROMPT", "The bicycle. ")
    monkeypatch.setattr(sys, "argv", ["steps", str(write_model(tmp_path)), "--threads", "1", "--rounds", "1"])
    steps.main()
    found = json.loads(capsys.readouterr().out)
    assert list(found["rows_ms"]) == ["1", "2", "4", "5", "8", "12", "16"]
    assert all(milliseconds > 0 for milliseconds in found["rows_ms"].values())
    assert list(found["batches"]) == ["1", "2", "4", "8", "16"]
    assert all(batch["tok_s"] > 0 and 0 < batch["host_share"] < 1 for batch in found["batches"].values())
    assert found["step_over_pass"] > 0
