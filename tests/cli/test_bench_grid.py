"""`paceline bench offline --grid` from the command line to its file, with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

TINY = ("--threads", 1, "--device", "cpu", "--max-tokens", 10, "--ignore-eos", "--drafter", "ngram:min_ngram=1")
SMALL = ("--grid", "--prompts", "base64", "--prompts", "hot", "--batch", 2, "--draft", "1,3")


def test_a_grid_goes_on_where_it_stopped(cli: Cli, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    argv = ("bench", "offline", tiny, *TINY, *SMALL, "--rounds", 4, "--count", 4, "--save", file, "--json")
    status, out, _ = cli(*argv, "--minutes", 1e-9)
    assert status == 0
    assert "Left out, the 1e-09 minutes were over: 3 cells" in out
    assert "Nothing was measured." in out
    status, out, _ = cli(*argv)
    found = json.loads(out.splitlines()[-1])
    assert (status, found["skipped"], len(found["cells"])) == (0, [], 3)
    assert [cell["ratio"] for cell in found["cells"]] == sorted(cell["ratio"] for cell in found["cells"])
    assert all(cell["identical"] == cell["answers"] for cell in found["cells"])
    assert {cell["best"]["title"] for cell in found["cells"]} <= {"ngram =1", "ngram =3"}
    assert "medians" in out
    lines = file.read_text().splitlines()
    assert len(lines) == 4
    again = json.loads(cli(*argv)[1].splitlines()[-1])
    assert (again["cells"], file.read_text().splitlines()) == (found["cells"], lines)
    status, _, err = cli(*argv, "--rounds", 5)
    assert status == 2
    assert "another setup (rounds 4, now 5)" in err


def test_what_belongs_to_a_grid_alone(cli: Cli, tiny: str, tmp_path: Path) -> None:
    for words, said in (
        (("--prompts", "base64", "--minutes", 1), "--minutes is for --grid"),
        ((), "--prompts is needed"),
        (("--grid", "--html", tmp_path / "a.html"), "leave out --html"),
        (("--grid", "--prompts", tmp_path / "nothing.jsonl"), "no prompts at"),
    ):
        status, _, err = cli("bench", "offline", tiny, *TINY, *words)
        assert status == 2
        assert said in err
