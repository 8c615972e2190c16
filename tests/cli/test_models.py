"""`paceline pull`, `list` and `rm`, against a stand-in of the hub; what was pulled answers under its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.models.hub.conftest import Serve


def test_a_model_is_pulled_listed_used_and_removed(cli: Cli, tiny: str, hub: Serve, home: Path) -> None:
    served = hub({"org/tiny": {path.name: path.read_bytes() for path in Path(tiny).iterdir()}})
    status, out, err = cli("pull", "org/tiny")
    place = home / "cache" / "models" / "org" / "tiny"
    assert (status, err) == (0, "")
    assert out.startswith("org/tiny: ")
    assert out.endswith(f" in {place}\n")
    assert "\norg/tiny" in "\n" + cli("list")[1]
    records = [json.loads(line) for line in cli("list", "--json")[1].splitlines()]
    assert [(r["name"], r["format"], r["path"]) for r in records if r["owner"] == "paceline"] == [
        ("org/tiny", "safetensors", str(place))
    ]
    asked = len(served.asked)
    status, out, _ = cli("generate", "org/tiny", "hello", "--format", "fp32", "--max-tokens", "3", "--json")
    assert status == 0
    assert len(json.loads(out)["tokens"]) == 3
    assert len(served.asked) == asked, "it is here"
    assert cli("rm", "org/tiny")[1].startswith("org/tiny: removed, ")
    assert not place.exists()
    assert cli("rm", "org/tiny")[0] == 2


def test_every_command_fetches_what_is_not_here(cli: Cli, tiny: str, hub: Serve) -> None:
    hub({"org/tiny": {path.name: path.read_bytes() for path in Path(tiny).iterdir()}})
    status, out, _ = cli("inspect", "org/tiny", "--format", "fp32", "--json")
    assert status == 0
    assert json.loads(out)["model"]["name"] == "org/tiny"


def test_names_that_are_none(cli: Cli, home: Path) -> None:
    assert "'smollm2' is no name on the hub; write org/name" in cli("pull", "smollm2")[2]
    assert cli("list")[0] == 0


def test_an_empty_list_says_how_to_fill_it(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.resolve.KNOWN", {})
    assert cli("list")[1] == "no models here; `paceline pull org/name` fetches one\n"
