"""`paceline replay` from the command line to its last line of JSON, with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.progress import Progress
from tests.bench.fake_server import FakeServer, good, plain, serving
from tests.cli.conftest import Cli
from tests.replay.recorded import ended, taken, write

OPTIONS = ("--threads", 1, "--sample", 2, "--drafter", "ngram", "--any-model")


@pytest.fixture(autouse=True)
def _short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.replay.what_if.SAMPLE_TOKENS", 12)
    monkeypatch.setattr("paceline.replay.meter.TURNS", 1)


def a_record(tmp_path: Path, **more: Any) -> Path:
    lines = []
    for i in range(6):
        prompt = [7, 8, 9, 10 + i] * 10
        timed = {"time_to_first": 0.01, "time_total": 0.05, "drafter": "ngram", "steps": 10, "rounds": 9}
        timed |= {"drafted": 18, "accepted": 6, "accepted_by_position": [4, 2]}
        lines += [taken(f"r{i}", 100.0 + 0.2 * i, prompt, **more), ended(f"r{i}", 16, **timed)]
    return write(tmp_path / "served.jsonl", *lines)


def found(cli: Cli, *argv: object) -> tuple[str, dict[str, Any]]:
    status, out, err = cli("replay", *argv, *OPTIONS, "--json")
    assert status == 0, err
    *shown, last = out.splitlines()
    return "\n".join(shown), json.loads(last)


def test_every_setting_is_simulated(cli: Cli, tiny: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown, record = found(cli, a_record(tmp_path), tiny, "--draft", "2,4", "--batch", "1,3", "--html", page)
    assert [run["arm"] for run in record["runs"]] == [
        "as recorded",
        *(f"{what} batch {batch}" for batch in (1, 3) for what in ("plain", "ngram ≤2", "ngram ≤4")),
    ]
    assert all(run["completed"] == 6 and run["total_output_tokens"] == 96 for run in record["runs"])
    assert record["acceptance"].startswith("measured: ")
    assert "scaled by" in record["scaling"]
    assert "as recorded" in shown
    assert "device hours" in shown
    assert "acceptance measured" in shown
    assert "ngram ≤4 batch 3" in page.read_text()
    assert record["times"]["host"][0] >= 0


@pytest.mark.parametrize(
    ("options", "source"),
    [(("--acceptance", "0.7"), "given: 0.7"), (("--acceptance", "record"), "recorded: 54 rounds of 6 requests")],
)
def test_acceptance_may_be_given_or_recorded(
    cli: Cli, tiny: str, tmp_path: Path, options: tuple[str, ...], source: str
) -> None:
    shown, record = found(cli, a_record(tmp_path), tiny, *options, "--scale", "2")
    assert source in record["acceptance"]
    assert f"acceptance {source}" in shown
    assert record["scale"] == 2.0
    assert record["scaling"] == "scaled by 2, as given"


def test_a_record_without_texts_is_replayed_by_its_statistics(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = a_record(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.pop("prompt_tokens", None):
            line |= {"prompt_length": 40}
    _shown, record = found(cli, write(path, *lines), tiny)
    assert record["acceptance"].startswith("recorded: ")
    assert record["runs"][-1]["completed"] == 6


def test_errors_against_a_real_replay(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path, saved = a_record(tmp_path), tmp_path / "real.json"
    with serving(FakeServer(good(words=8))) as server:
        status, out, err = cli("replay", path, "--real", server.url, "--speed", 20, "--save", saved)
    assert status == 0, err
    assert "6 of 6 answers came to their end." in out
    assert [body["prompt"][3] for body in server.asked] == [10, 11, 12, 13, 14, 15]
    shown, record = found(cli, path, tiny, "--against", saved)
    assert next(each["figure"] for each in record["errors_against"]) == "tokens a second"
    assert "simulated" in shown
    assert "TTFT p50, ms" in shown


def test_a_plain_replay_has_no_drafter(cli: Cli, tiny: str, tmp_path: Path) -> None:
    status, out, err = cli("replay", a_record(tmp_path), tiny, "--any-model", "--drafter", "none", "--threads", 1)
    assert status == 0, err
    assert "plain batch 64" in out
    assert "not calibrated: the record was made with ngram" in out


def test_an_interrupt_says_that_the_result_is_partial(
    cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.replay import simulate

    real = simulate.simulate

    def stopped(setting: simulate.Setting, arrivals: Any, *, tick: Callable[[], None] = lambda: None) -> simulate.Run:
        def stop() -> None:
            raise KeyboardInterrupt

        return real(setting, arrivals, tick=stop)

    monkeypatch.setattr(simulate, "simulate", stopped)
    status, out, _err = cli("replay", a_record(tmp_path), tiny, *OPTIONS, "--scale", 1)
    assert status == 130
    assert "Interrupted: a part of the traffic." in out
    assert "ngram ≤16" not in out


def test_an_interrupted_real_replay_keeps_what_came(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "count", stop)
    with serving(FakeServer(good(words=8))) as server:
        status, out, _ = cli("replay", a_record(tmp_path), "--real", server.url)
    assert status == 130
    assert "Interrupted: a part of the traffic. 1 of 6 answers came to their end." in out


def test_a_server_that_fails_is_no_success(cli: Cli, tmp_path: Path) -> None:
    def refuse(body: Any, number: int) -> Any:
        yield plain(500, '{"error": {"message": "no"}}')

    with serving(FakeServer(refuse)) as server:
        status, out, _ = cli("replay", a_record(tmp_path), "--real", server.url, "--speed", 50)
    assert status == 1
    assert "6 × 500: no" in out
    assert "0 of 6 answers came to their end." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "0"), "a whole number from 1 on is needed, not '0'"),
        (("--draft", "x"), "a whole number from 1 on is needed"),
        (("--acceptance", "1.5"), "a probability from 0 to 1"),
        (("--acceptance", "1,2"), "a probability from 0 to 1"),
        (("--speed", "0"), "a number above 0"),
        (("--stream-interval", "1,2"), "a number of seconds"),
        (("--batch", "2", "--max-sequences", "2"), "--batch and --max-sequences are one limit"),
        (("--draft", "2", "--max-draft", "2"), "--draft and --max-draft are one limit"),
        (("--device", "cuda"), "a simulation is of steps on a CPU"),
        (("--real", "http://127.0.0.1:9", "--batch", "2"), "--real asks a server as it is"),
        (("--real", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--against", "nowhere.json"), "has no real replay"),
        (("--no-such-option",), "unknown option"),
        ((), "the record is of the model tiny"),
    ],
)
def test_bad_options_are_refused(cli: Cli, tiny: str, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    status, _out, err = cli("replay", a_record(tmp_path), tiny, *options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_bad_records_are_refused(cli: Cli, tiny: str, tmp_path: Path) -> None:
    for lines, message in (
        ([], "holds no requests"),
        ([taken("a", 0.0, [10**6]), ended("a", 3)], "token 1000000 is outside of the vocabulary"),
        ([taken("a", 0.0, [5] * 300), ended("a", 3)], "need more than the"),
        ([{"id": "a", "prompt_tokens": [5]}], "give --rate R"),
    ):
        status, _, err = cli("replay", write(tmp_path / "bad.jsonl", *lines), tiny, *OPTIONS)
        assert status == 2
        assert message in err
