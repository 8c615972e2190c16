"""`paceline tune` from the command line to its files, with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.prompts_and_results import check_place
from paceline.errors import StorageError
from paceline.tune.study import Study
from tests.cli.conftest import Cli
from tests.cli.tiny_model import SPECIAL, write_model

TINY = ("--threads", 1, "--device", "cpu", "--max-tokens", 10, "--ignore-eos", "--raw")
SMALL = ("--draft", "1,3", "--batch", "1,2", "--rounds", 4)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    lines = [{"prompt": f"one two three {i} one two three {i}"} for i in range(4)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def tuned(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_a_tuning_from_prompts_to_a_config(cli: Cli, tiny: str, asked: Path, tmp_path: Path) -> None:
    config, page = tmp_path / "new" / "c.yaml", tmp_path / "t.html"
    argv = ("tune", tiny, *TINY, *SMALL, "--prompts", asked, "--config", config, "--html", page, "--json")
    status, out, _ = cli(*argv)
    found = tuned(out)
    assert status == 0
    made = {(each["drafter"], each["draft"], each["batch"]) for each in found["predictions"]}
    assert made == {(name, draft, batch) for name in ("suffix", "ngram") for draft in (1, 3) for batch in (1, 2)}
    for batch in (1, 2):
        ways = [cell["way"] for cell in found["cells"] if cell["batch"] == batch]
        assert ways[:2] == ["plain", "default"]
        assert len([way for way in ways if "k=" in way]) == 3
    assert found["errors"]["cells"] == 6
    assert found["choice"]["way"] in {cell["way"] for cell in found["cells"]}
    assert f"model: {json.dumps(tiny)}" in config.read_text()
    assert "drafter: [" in config.read_text()
    assert f"serve --config {config}" in out
    for words in ("1 at once: ", "2 at once: ", "predictions are within 10%", "Choice: "):
        assert words in out
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "Throughput and latency" in html


def test_a_killed_tuning_goes_on(
    cli: Cli, tiny: str, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a part keeps the parts before it, and a torn line is cut off."""
    file = tmp_path / "state.jsonl"
    argv = ("tune", tiny, *TINY, *SMALL, "--drafter", "ngram", "--prompts", asked, "--save", file, "--json")
    kept, costs = [], Study._costs

    def stop(self: Study, number: int, batch: int) -> dict[str, Any]:
        if batch == 2 and not kept:
            kept.append(batch)
            raise KeyboardInterrupt
        return costs(self, number, batch)

    monkeypatch.setattr(Study, "_costs", stop)
    status, out, err = cli(*argv)
    found = tuned(out)
    assert (status, found["interrupted"], found["choice"], found["cells"]) == (130, True, None, [])
    assert f"--save {file} goes on" in err
    before = file.read_text()
    names = [json.loads(line)["name"] for line in before.splitlines()[1:]]
    assert names == ["plain answers", "lengths of ngram", "drafts of ngram", "steps of ngram, 1 at once"]
    file.write_text(before + '{"name": "to', encoding="utf-8")
    status, out, _ = cli(*argv)
    found = tuned(out)
    assert (status, found["interrupted"], len(found["predictions"])) == (0, False, 4)
    assert file.read_text().startswith(before)
    whole = file.read_text()
    again = tuned(cli(*argv)[1])
    assert (again["cells"], file.read_text()) == (found["cells"], whole)
    status, _, err = cli(*argv, "--rounds", 5)
    assert (status, "another setup (rounds 4, now 5)" in err) == (2, True)
    assert file.read_text() == whole


def test_a_state_of_another_model_or_kind(cli: Cli, tiny: str, asked: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "state.jsonl", tmp_path / "other"
    other.mkdir()
    write_model(other, seed=1)
    argv = (*TINY, "--prompts", asked, "--drafter", "ngram", "--save", file, "--minutes", 1e-9)
    assert cli("tune", tiny, *argv)[0] == 0
    status, _, err = cli("tune", other, *argv)
    assert status == 2
    assert "was begun with another setup" in err
    assert "save to a new file" in err
    lines = file.read_text().splitlines()
    first = json.loads(lines[0])
    first["setup"]["machine"]["paceline"] = "0.0.1"
    file.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n", encoding="utf-8")
    assert "another setup (machine" in cli("tune", tiny, *argv)[2]
    for text in ('{"benchmark": "grid", "setup": {}}\n', "words\n"):
        file.write_text(text, encoding="utf-8")
        status, _, err = cli("tune", tiny, *argv)
        assert (status, "is no file of `paceline tune`" in err) == (2, True)
        assert file.read_text() == text
    file.write_bytes(b"\xff\xfe\n")
    assert "cannot be read" in cli("tune", tiny, *argv)[2]


def test_candidates_are_judged_and_bad_ones_say_why(cli: Cli, tiny: str, asked: Path, tmp_path: Path) -> None:
    other, bridged = tmp_path / "other", tmp_path / "bridged"
    for path, special in ((other, SPECIAL), (bridged, (*SPECIAL, "<|one more|>"))):
        path.mkdir()
        write_model(path, seed=1, special=special)
    names = f"nosuch,{tiny},{other},{bridged}"
    status, out, _ = cli(
        "tune", tiny, *TINY, *SMALL, "--rounds", 1, "--prompts", asked, "--candidates", names, "--best", 0, "--json"
    )
    found = tuned(out)
    pairs = {pair["drafter"]: pair for pair in found["pairs"]}
    good, bad = tiny, str(other)
    assert (status, [*pairs]) == (0, ["suffix", good, bad, str(bridged)])
    assert pairs[good]["overlap"] > 0.9  # the target itself, in another format
    assert pairs[good]["coupled"] > 0.9
    assert pairs[bad]["overlap"] < 0.6
    assert pairs[good]["vocabulary"] == 1.0
    assert pairs[good]["weight_bytes"] > 0
    assert pairs[good]["kv_bytes_per_token"] > 0
    assert 0 < pairs[str(bridged)]["vocabulary"] < 1.0
    assert set(found["failed"]) == {"nosuch"}
    assert "unknown drafter" in found["failed"]["nosuch"]
    assert "nosuch: left out, unknown drafter" in out
    assert "overlap Σ min(p, q)" in out
    accepted = {each["drafter"]: each["acceptance"] for each in found["predictions"] if each["draft"] == 3}
    assert accepted[good] > accepted[bad]


def test_limits_of_latency(cli: Cli, tiny: str, asked: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    argv = ("tune", tiny, *TINY, *SMALL, "--drafter", "ngram", "--prompts", asked, "--config", config, "--json")
    status, out, _ = cli(*argv, "--slo", "tpot=0.0001ms")
    assert (status, tuned(out)["choice"]) == (1, None)
    assert "Nothing keeps to tpot=0.0001ms: " in out
    assert "comes nearest" in out
    assert not config.exists()
    status, out, _ = cli(*argv, "--slo", "tpot=60s", "--slo", "ttft=60s")
    assert status == 0
    assert "Within tpot=60000ms and ttft=60000ms, at most 2 at once." in out
    assert "max_sequences: 2" in config.read_text()


def test_a_record_of_a_server(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    argv = ("tune", tiny, *TINY, *SMALL, "--drafter", "ngram", "--prompts", path, "--best", 1, "--json")
    lines = [json.dumps({"id": f"r{i}", "prompt_tokens": [5 + i, 6, 7, 5 + i, 6, 7]}) for i in range(3)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, out, _ = cli(*argv)
    assert (status, tuned(out)["answers"]) == (0, 3)
    path.write_text(json.dumps({"id": "r0", "prompt_tokens": [5, 100_000]}) + "\n", encoding="utf-8")
    status, _, err = cli(*argv)
    assert status == 2
    assert "'r0' has token 100000" in err
    assert "recorded with another model" in err
    path.write_text("", encoding="utf-8")
    status, _, err = cli(*argv)
    assert (status, "holds no prompts" in err) == (2, True)


def test_time_that_is_over_is_said(cli: Cli, tiny: str, asked: Path) -> None:
    status, out, _ = cli("tune", tiny, *TINY, *SMALL, "--drafter", "ngram", "--prompts", asked, "--minutes", 1e-9)
    assert status == 0
    assert "The time was over before: drafts of ngram; steps of ngram, 1 at once" in out
    assert "Nothing was measured that could be compared." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slo", "tpot=4"), "--slo is such as tpot=40ms"),
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--temperature", "-1"), "--temperature must be from 0 to 100"),
        (("--candidates", "a,,b"), "--candidates is such as"),
        (("--best", "few"), "a whole number from 0 on, or all"),
        (("--prompts", "/nowhere.jsonl"), "no prompts at"),
        (("--drafter", "nosuch"), "unknown drafter"),
    ],
)
def test_bad_requests(cli: Cli, tiny: str, words: tuple[str, ...], said: str) -> None:
    status, _, err = cli("tune", tiny, *TINY, *words)
    assert (status, said in err) == (2, True)


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new" / "server.yaml", tmp_path / "old.yaml"
    old.write_text("draft: 2")
    check_place(new)
    check_place(old)
    assert (new.exists(), old.read_text()) == (False, "draft: 2")
    with pytest.raises(StorageError, match="cannot be written"):
        check_place(tmp_path)
