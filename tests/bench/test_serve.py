"""Runs of a load: turns, blocks, what goes away in the middle, and the record of it all."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from tests.bench.fake_server import STREAM, Answer, Body, FakeServer, delta, good, plain, serving

VLLM = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors",
    "max_concurrent_requests",
    *(f"{n}_{m}_ms" for n in ("mean", "median", "std", "p90", "p95", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip  # a field a line would hide what belongs together


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"id": i, "category": "even" if i % 2 == 0 else "odd", "prompt": f"say {i}"}) for i in range(12)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class Bench:
    """Runs `paceline bench serve` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], prompts: str) -> None:
        self._capsys, self._prompts = capsys, prompts
        self.out = self.err = ""

    def __call__(self, url: str, *words: object) -> tuple[int, dict[str, Any]]:
        argv = ["bench", "serve", "--url", url, "--timeout", "100", "--json", *map(str, words)]
        status = main(argv if "--prompts" in words else [*argv, "--prompts", self._prompts])
        self.out, self.err = self._capsys.readouterr()
        return status, json.loads(self.out.splitlines()[-1]) if self.out else {}


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], prompts: str) -> Bench:
    return Bench(capsys, prompts)


def test_one_run_has_the_keys_of_vllm(bench: Bench) -> None:
    with serving(FakeServer(good(words=3))) as server:
        status, found = bench(server.url, "--concurrency", 3, "--goodput", "ttft:60000", "tpot:60000")
    assert status == 0
    assert set(found) >= VLLM
    assert (found["completed"], found["failed"], found["num_prompts"]) == (12, 0, 12)
    assert found["total_output_tokens"] == 12 * 6
    assert found["total_input_tokens"] == 12 * 7
    assert found["tokens_per_chunk"] == 2
    assert found["output_throughput"] == pytest.approx(72 / found["duration"])
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["categories"]["odd"]["completed"] == 6
    assert server.most_open <= found["max_concurrent_requests"] <= 3
    assert server.most_open > 1
    assert {(body["temperature"], body["top_p"]) for body in server.asked} == {(0.0, 1.0)}
    assert len(server.asked) == 13  # with the one that warms up
    assert "12/12" in bench.out


def test_goodput_counts_what_keeps_the_limits(bench: Bench) -> None:
    with serving(FakeServer(good())) as server:
        assert bench(server.url, "--goodput", "e2el:0.001")[1]["request_goodput"] == 0


def test_several_loads_and_temperatures(bench: Bench, tmp_path: Path) -> None:
    with serving(FakeServer(good())) as server:
        words = ("--concurrency", "1,2", "--temperature", "0,1", "--save", tmp_path / "a.json")
        status, found = bench(server.url, *words)
    assert status == 0
    assert [(r["max_concurrency"], r["temperature"]) for r in found["runs"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert json.loads((tmp_path / "a.json").read_text()) == found
    salts = {body["cache_salt"] for body in server.asked}
    assert len(salts) == 5  # no run finds what another has left, nor what warmed up


def test_arms_take_turns_on_the_same_prompts(bench: Bench) -> None:
    def answer(body: Body, number: int) -> Iterator[bytes]:
        yield from good(words=2 if body["speculation"]["enabled"] else 8)(body, number)

    with serving(FakeServer(answer)) as server:
        status, found = bench(server.url, "--compare", "on,off", "--concurrency", 1)
    assert status == 0
    on, off = found["runs"]
    assert on["prompt_ids"] == off["prompt_ids"] == [str(i) for i in range(12)]
    assert len(on["block_seconds"]) == 6
    asked = [body["speculation"]["enabled"] for body in server.asked[2:]]
    assert asked == [True, True, False, False, False, False, True, True] * 3
    [pair] = found["comparisons"]
    assert (pair["arm"], pair["against"], pair["pairs"], pair["identical_texts"]) == ("on", "off", 12, 0)
    mean = [sum(run["latencies"]) / 12 for run in (on, off)]
    assert pair["ratios"]["mean_e2el_ms"]["ratio"] == pytest.approx(mean[0] / mean[1])
    assert pair["ratios"]["mean_e2el_ms"]["units"] == 6
    assert pair["ratios"]["output_throughput"]["units"] == 6


def test_two_servers(bench: Bench) -> None:
    with serving(FakeServer(good())) as one, serving(FakeServer(good())) as other:
        status, found = bench(one.url, "--compare", f"{one.url},{other.url}", "--no-cache-salt")
        assert status == 0
        assert [run["base_url"] for run in found["runs"]] == [one.url, other.url]
        assert len(one.asked) == len(other.asked) == 13
        assert not {"speculation", "cache_salt"} & {*one.asked[0], *other.asked[0]}
        assert found["comparisons"][0]["identical_texts"] == 12


def test_acceptance_is_the_difference_of_counters(bench: Bench) -> None:
    def metrics() -> str:
        n = 10 * len(server.asked)
        counted = {"drafts": n, "draft_tokens": 4 * n, "accepted_tokens": n, 'accepted_tokens_per_pos{position="0"}': n}
        return "".join(f"vllm:spec_decode_num_{name} {value}\n" for name, value in counted.items())

    with serving(FakeServer(good(), metrics=metrics)) as server:
        _, found = bench(server.url)
    assert found["spec_decode_num_drafts"] == 120  # without what warmed up
    assert found["spec_decode_acceptance_rate"] == 25
    assert found["spec_decode_acceptance_length"] == 2
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0]


def test_some_requests_fail(bench: Bench) -> None:
    def answer(body: Body, number: int) -> Iterator[bytes | None]:
        yield from [STREAM + delta("x"), None] if number % 3 == 2 else good()(body, number)

    with serving(FakeServer(answer)) as server:
        status, found = bench(server.url)
    assert status == 1
    assert (found["completed"], found["failed"]) == (8, 4)
    assert len(found["ttfts"]) == len(found["errors"]) == 12
    assert found["total_output_tokens"] == 8 * 8
    assert "4 × the connection broke after 1 chunks" in bench.out


def test_a_server_that_dies_in_the_middle(bench: Bench) -> None:
    def answer(body: Body, number: int) -> Iterator[bytes | None]:
        if number == 5:
            server.die()
            yield None
        yield from good()(body, number)

    with serving(FakeServer(answer)) as server:
        status, found = bench(server.url, "--concurrency", "1,2")
    assert status == 1
    [run] = found.get("runs", [found])  # the second load never began
    assert run["completed"] == 4
    assert run["failed"] + run["not_sent"] == 8
    assert run["not_sent"] > 0
    assert "the server went away" in bench.out


@pytest.mark.parametrize(
    ("answer", "models", "words", "message"),
    [
        (good(), "[]", (), "names no model"),
        (good(), "<html>", (), "names no model"),
        (lambda body, number: iter([plain(404, '{"error": {"message": "no such model"}}')]), None, (), "no such model"),
        (good(), None, ("--compare", "on"), "two different arms"),
        (good(), None, ("--compare", "on,on"), "two different arms"),
        (good(), None, ("--rate", "0"), "above 0"),
        (good(), None, ("--rate", "1:2:3"), "above 0"),
        (good(), None, ("--goodput", "speed:3"), "ttft:200"),
        (good(), None, ("--extra-body", "[]"), "JSON object"),
        (good(), None, ("--extra-body", "{"), "not JSON"),
        (good(), None, ("--temperature", "warm"), "0,0.7,1"),
        (good(), None, ("--warm-up", "-1"), "from 0 on"),
        (good(), None, ("--prompts", "nowhere.jsonl"), "no prompts at nowhere.jsonl"),
    ],
)
def test_nothing_can_be_measured(
    bench: Bench, answer: Answer, models: str | None, words: tuple[str, ...], message: str
) -> None:
    with serving(FakeServer(answer, models=models)) as server:
        status, found = bench(server.url, *words)
    assert (status, found) == (2, {})
    assert message in bench.err


def test_nobody_answers(bench: Bench) -> None:
    assert bench("http://127.0.0.1:9")[0] == 2
    assert "no server answers at http://127.0.0.1:9" in bench.err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, expected: int
) -> None:
    from paceline.bench import serve

    ask = serve.Client.send

    async def asked(self: Any, *args: Any) -> Any:
        if len(server.asked) == 5:
            signal.raise_signal(number)
        return await ask(self, *args)

    monkeypatch.setattr(serve.Client, "send", asked)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with serving(FakeServer(good())) as server:
        status, found = bench(server.url)
    signal.signal(signal.SIGINT, before)
    assert status == expected
    assert found["interrupted"]
    assert found["conclusion"].startswith("Interrupted; so far: 4 of 4 requests were answered")
    assert found["completed"] == 4


def test_made_up_prompts_are_as_long_as_the_server_counts(bench: Bench) -> None:
    """A word of this server is two tokens, and a chat has ten of its own."""

    def length(body: Body) -> int:
        return 10 + 2 * len(body["messages"][0]["content"].split())

    with serving(FakeServer(good(length=length))) as server:
        _, found = bench(server.url, "--prompts", "random", "--input-tokens", 200, "--count", 3)
    assert found["input_lens"] == [200] * 3


def test_a_key_is_not_in_the_results(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--api-key", "secret-key-1", "--api-key=secret-key-2"]
    monkeypatch.setattr("sys.argv", ["paceline", "bench", "serve", *words])
    with serving(FakeServer(good())) as server:
        status, found = bench(server.url, *words)
    assert status == 0
    assert "secret" not in json.dumps(found)


def test_without_httpx_the_command_to_type_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert bench("http://127.0.0.1:9")[0] == 2
    assert "pip install '.[bench]'" in bench.err
