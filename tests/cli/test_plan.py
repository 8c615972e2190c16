"""`paceline plan` from the command line: plans, clusters, comparisons, bad input, and an interrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CLUSTER = ("--replicas", "1,3", "--rate-each", 8, "--seconds", 5)
DRAFTER = ("--drafter", "llama-3.2-1b", "--acceptance", 0.8)


def test_a_plan_for_people(cli: Cli) -> None:
    status, out, _ = cli("plan", "llama-3.1-8b", "--gpus", "h200:2", *DRAFTER)
    assert status == 0
    assert "2 × NVIDIA H200 SXM: 2 replicas of 1 GPU" in out
    assert "KV room: " in out
    assert "within 15 %" in out


def test_a_plan_for_programs(cli: Cli, tiny: str) -> None:
    status, out, _ = cli("plan", tiny, "--gpus", "h100", "--context", 32, "--batch", "1,2", "--json")
    assert status == 0
    found = json.loads(out)
    assert [batch["batch"] for batch in found["batches"]] == [1, 2]
    assert found["sources"]["speed"].startswith("an estimate: the data sheet")


def test_a_cluster_is_simulated(cli: Cli) -> None:
    prefixes = ("--prefixes", 6, "--prefix-tokens", 100)
    status, out, _ = cli("plan", "llama-3.1-8b", "--gpus", "h200", *DRAFTER, *CLUSTER, *prefixes, "--json")
    assert status == 0
    found = json.loads(out)
    rows = found["rows"]
    assert [(row["replicas"], row["routing"], row["speculation"]) for row in rows] == [
        (count, routing, drafts)
        for count in (1, 3)
        for routing in ("random", "least-waiting", "prefix")
        for drafts in (False, True)
    ]
    assert all(row["requests"] == 40 * row["replicas"] and 0 < row["utilisation"] <= 1 for row in rows)
    assert all(row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] for row in rows)
    assert all(fast["tpot_s"]["p50"] < slow["tpot_s"]["p50"] for slow, fast in zip(rows[::2], rows[1::2], strict=True))
    assert found["cluster"]["router_source"].startswith("no limit")
    again = cli("plan", "llama-3.1-8b", "--gpus", "h200", *DRAFTER, *CLUSTER, *prefixes, "--json")[1]
    assert again == out


def test_a_cluster_for_people_and_for_a_page(cli: Cli) -> None:
    words = ("plan", "llama-3.1-8b", "--gpus", "h200", *CLUSTER, "--router-rate", 20)
    out = cli(*words)[1]
    assert "router: 20 requests/s, as given by --router-rate, not measured" in out
    assert "the router is the limit with 3 replicas" in out
    assert "on" not in [row.split()[2] for row in out.splitlines() if "random" in row]
    page = cli(*words, "--markdown")[1].splitlines()
    assert page[0].startswith("| replicas | routing | drafts |")
    assert len(page) == 2 + 4
    assert {line.count("|") for line in page} == {12}


def test_one_rate_for_all_replicas(cli: Cli) -> None:
    words = ("plan", "llama-3.1-8b", "--gpus", "h200", "--replicas", "1,4", "--rate", 10, "--seconds", 5)
    rows = json.loads(cli(*words, "--routing", "random", "--json")[1])["rows"]
    assert [row["rate"] for row in rows] == [10, 10]
    assert rows[0]["at_once"] > rows[1]["at_once"]


def test_answers_that_are_too_long_are_cut_and_said(cli: Cli, tiny: str) -> None:
    lengths = ("--prompt-tokens", 100, "--output-tokens", 100, "--context", 32)
    out = cli("plan", tiny, "--gpus", "h200", "--replicas", 1, "--rate", 50, "--seconds", 5, *lengths)[1]
    assert "too long for a replica, which was cut" in out


def test_records_are_compared(cli: Cli, tmp_path: Path) -> None:
    path = RESULTS / "engine-llama-3.2-1b.json"
    status, out, _ = cli("plan", "--against", path, RESULTS / "reading-llama-3.1-8b-8192.json")
    assert status == 0
    assert "llama-3.2-1b, plain, batch 1" in out
    record = json.loads(path.read_text())
    record["batches"][0]["plain"]["step_ms"] *= 2
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(record))
    status, out, _ = cli("plan", "--against", slow, "--json")
    assert status == 1
    assert json.loads(out)[0]["error"] < -0.4


H200 = ("llama-3.1-8b", "--gpus", "h200")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a MODEL and --gpus"),
        (("llama-3.1-8b",), "name a MODEL and --gpus"),
        (("llama-3.1-8b", "--gpus", "a100"), "unknown GPU 'a100'"),
        (("qwen3-32b", "--gpus", "h100", "--context", 40960), "2 would do: --gpus h100:2"),
        ((*H200, "--tensor-parallel", 2), "write --gpus h200:2"),
        ((*H200, "--drafter", "llama-3.2-1b", "--drafter-tensor-parallel", 2), "give --tensor-parallel, too"),
        ((*H200, "--drafter", "ngram", "--acceptance", 1.01), "acceptance must be in [0, 1]"),
        ((*H200, "--rate", 5), "--rate is for a simulated cluster"),
        ((*H200, "--markdown"), "--markdown is for a simulated cluster"),
        ((*H200, "--replicas", 2), "give --rate R"),
        ((*H200, "--replicas", 2, "--rate", 1, "--rate-each", 1), "one of the two"),
        ((*H200, *CLUSTER, "--routing", "fast"), "unknown routing 'fast'"),
        ((*H200, *CLUSTER, "--routing", "prefix"), "give --prefixes and --prefix-tokens"),
        ((*H200, *CLUSTER, "--prefixes", 3), "belong together"),
        ((*H200, *CLUSTER, "--prefixes", 3, "--prefix-tokens", 512), "must be below --prompt-tokens 512"),
        ((*H200, *CLUSTER, "--prompt-tokens", 70000), "too long for a replica"),
        ((*H200, *CLUSTER, "--lengths", "odd"), "unknown lengths 'odd'"),
        ((*H200, *CLUSTER, "--router-rate", 0), "router_rate must be in (0,"),
        ((*H200, "--replicas", 9, "--rate-each", 1e6), "a simulation takes 1 to"),
        ((*H200, "--replicas", 1, "--rate", "nan"), "finite number"),
        (("--against", "missing.json"), "--against missing.json"),
        (("--against", RESULTS / "vllm-h200.json"), "`paceline bench engine --json`"),
        (("--against", RESULTS / "peers-mt_bench.jsonl"), "give a file that"),
    ],
)
def test_bad_input_is_refused_in_clear_words(cli: Cli, words: tuple[object, ...], said: str) -> None:
    status, out, err = cli("plan", *words)
    assert (status, out) == (2, "")
    assert said in err


def test_a_list_is_no_record(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[]")
    assert "no record" in cli("plan", "--against", path)[2]


def test_an_interrupt_keeps_what_is_simulated(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.plan import cluster_report

    simulate, calls = cluster_report.simulate, []

    def stopped(*args: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return simulate(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster_report, "simulate", stopped)
    status, out, _ = cli("plan", *H200, *CLUSTER)
    assert status == 130
    assert out.count(" off ") == 2
    assert "interrupted: further rows are missing" in out
