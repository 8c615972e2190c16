"""`paceline bench ramp` from the command line to its file, with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

TINY = ("--threads", 1, "--device", "cpu", "--max-tokens", 10, "--drafter", "ngram:min_ngram=1", "--prompts", "base64")


def test_a_ramp_is_told_and_saved(cli: Cli, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "ramp.json"
    argv = ("--most", 3, "--seconds", 1, "--window", 1, "--rounds", 1, "--count", 4, "--save", file, "--json")
    status, out, err = cli("bench", "ramp", tiny, *TINY, *argv)
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text()) == found
    assert [window["from"] for window in found["windows"]] == [0]
    assert all(window["plain_tok_s"] > 0 and window["speculative_tok_s"] > 0 for window in found["windows"])
    assert "windows at 0.97 of plain speed or more" in out
    assert found["drafters"].keys() == {"ngram"}


def test_what_cannot_be_measured(cli: Cli, tiny: str, tmp_path: Path) -> None:
    for words, said in (
        (("--seconds", 3), "no window of 5 s"),
        (("--drafter", "none"), "nothing drafts"),
        (("--prompts", tmp_path / "nothing.jsonl"), "no prompts at"),
    ):
        status, _, err = cli("bench", "ramp", tiny, *(TINY if "--drafter" not in words else TINY[:6]), *words)
        assert status == 2
        assert said in err
