"""The same requests to several servers: equal texts pass, the first difference is shown, a failure is no success."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.audit import servers
from paceline.audit.cases import variants
from paceline.audit.servers import Case, Compared, cases, compare, facts, report
from paceline.bench.client import Client
from paceline.cli.main import main
from paceline.errors import InvalidRequest
from paceline.prompts.files import Prompt

A, B = "http://a", "http://b"
PROMPTS = [Prompt("q1", "c", ({"role": "user", "content": "Hello"},)), Prompt("q2", "c", tokens=(1, 2))]
Answerer = Callable[[httpx.Request], httpx.Response]


def server(text: Callable[[dict[str, Any]], str] = lambda body: f"text of {body['seed']}", **more: Any) -> Answerer:
    """A server whose text follows from the body."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        said = text(body)
        part = {"message": {"content": said}} if "messages" in body else {"text": said}
        choice = {"finish_reason": "stop", "token_ids": [len(said)], **part, **more}
        replica = f"r{hash(request.headers['x-session-id']) % 2}"
        return httpx.Response(200, json={"choices": [choice]}, headers={"x-paceline-replica": replica})

    return answer


def connecting(**answerers: Answerer) -> Callable[..., Client]:
    def connect(url: str, *, key: str | None = None) -> Client:
        client = Client(url, key=key)
        headers = client.http.headers
        transport = httpx.MockTransport(answerers[url.removeprefix("http://")])
        client.http = httpx.AsyncClient(base_url=url, transport=transport, headers=headers)
        return client

    return connect


def asked(edits: bool = False) -> list[Case]:
    return cases(PROMPTS, variants((0.0, 1.0), edits=edits, max_tokens=5), seed=7)


def compared(*, repeats: int = 1, **answerers: Answerer) -> Compared:
    urls = [f"http://{name}" for name in answerers]
    return asyncio.run(compare(urls, asked(), repeats=repeats, connect=connecting(**answerers)))


def test_every_request_names_all_that_its_text_depends_on() -> None:
    found = asked(edits=True)
    assert len(found) == 8
    path, body = found[0].request()
    assert path == "/v1/chat/completions"
    assert (body["seed"], body["temperature"], body["max_tokens"], body["top_p"]) == (7, 0.0, 5, 1.0)
    path, body = found[-1].request()
    assert (path, body["prompt"], body["seed"], body["top_k"]) == ("/v1/completions", [1, 2], 8, 50)


def test_equal_servers_pass() -> None:
    found = compared(a=server(), b=server(), repeats=3)
    assert found.passed
    assert len(found.answers) == found.asked == 4 * 2 * 3
    assert found.replicas(A) | found.replicas(B) == {"r0", "r1"}
    text = report(found, [A, B])
    assert text.startswith("4 requests to 2 servers: 24 of 24 answers\n")
    assert "http://a: 12 answers from " in text
    assert text.endswith("the same text everywhere")
    assert facts(found, [A, B])["passed"] is True


def test_the_first_difference_is_shown() -> None:
    def odd(body: dict[str, Any]) -> str:
        return f"text of {body['seed']}" if body["temperature"] == 0 else f"text in {body['seed']}"

    found = compared(a=server(), b=server(odd))
    assert [difference.case.name for difference in found.differences] == ["q1, T=1, seed 7", "q2, T=1, seed 8"]
    first = found.differences[0]
    assert (first.place, first.first.url, first.other.url) == (5, A, B)
    text = report(found, [A, B])
    assert "2 answers differ; the first:\n    q1, T=1, seed 7, from character 5 on" in text
    assert "'text of 7'" in text
    assert "'text in 7'" in text
    assert not facts(found, [A, B])["passed"]


def test_one_text_may_begin_like_the_other() -> None:
    found = compared(a=server(), b=server(lambda body: f"text of {body['seed']} and more"))
    assert found.differences[0].place == len("text of 7")


@pytest.mark.parametrize("more", [{"finish_reason": "length"}, {"token_ids": [99]}])
def test_ends_and_tokens_count_too(more: dict[str, Any]) -> None:
    assert len(compared(a=server(), b=server(**more)).differences) == 4


SCORES = [-0.5, -1.25]


def scored(*scores: float) -> Answerer:
    """A server that tells log-probabilities where it is asked for them: of a chat, and of a completion."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return server()(request)
        body = json.loads(request.content)
        told: dict[str, Any] = {"token_logprobs": scores}
        if "messages" in body:
            told = {"content": [{"logprob": score} for score in scores]}
        asked = {"messages": True, "prompt": 0}["messages" if "messages" in body else "prompt"]
        return server(logprobs=told if body.get("logprobs") is asked else None)(request)

    return answer


def compared_in_every_bit(**answerers: Answerer) -> Compared:
    every = [replace(case, scored=True) for case in asked()]
    return asyncio.run(compare([A, B], every, connect=connecting(**answerers)))


def test_log_probabilities_count_if_they_are_asked_for() -> None:
    same = compared_in_every_bit(a=scored(*SCORES), b=scored(*SCORES))
    assert report(same, [A, B]).endswith("the same text and log-probabilities everywhere")
    assert facts(same, [A, B])["logprobs"] is True
    other = scored(SCORES[0], SCORES[1] + 2**-50)
    differs = compared_in_every_bit(a=scored(*SCORES), b=other)
    assert len(differs.differences) == 4
    assert "q1, T=0, seed 7, log-probability of token 1\n    http://a (replica r" in report(differs, [A, B])
    assert "): -1.25\n" in report(differs, [A, B])
    assert compared(a=scored(*SCORES), b=other).passed


def test_a_server_without_log_probabilities_fails_where_they_are_asked_for() -> None:
    found = compared_in_every_bit(a=server(), b=scored(*SCORES))
    assert [said.error for said in found.failures] == [found.failures[0].error] * 4
    assert "no answer of OpenAI's form with log-probabilities" in report(found, [A, B])


def test_servers_that_tell_no_tokens_are_compared_by_text() -> None:
    assert compared(a=server(), b=server(token_ids=None)).passed


def test_a_difference_between_replicas_of_one_address_is_found() -> None:
    turns = iter(range(1000))
    assert compared(a=server(lambda body: str(next(turns))), repeats=2).differences


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(503, json={"error": {"message": "not now"}}), "503: not now"),
        (httpx.Response(200, json={"choices": []}), "no answer of OpenAI's form"),
        (httpx.Response(200, text="<html>"), "no answer of OpenAI's form: '<html>'"),
    ],
)
def test_a_failure_is_no_success(answer: httpx.Response, error: str) -> None:
    good = server()
    found = compared(a=good, b=lambda request: good(request) if request.method == "GET" else answer)
    assert not found.passed
    assert not found.differences
    assert f"4 requests failed; the first, of http://b: {error}" in report(found, [A, B])


def test_a_connection_that_breaks_is_a_failure() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return server()(request)
        raise httpx.ReadError("gone")

    assert [said.error for said in compared(a=server(), b=broken).failures] == ["gone"] * 4


def test_a_server_that_is_away_is_an_error() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(InvalidRequest, match="no server answers at http://b"):
        compared(a=server(), b=away)


def test_an_interruption_keeps_what_is_there() -> None:
    async def work() -> Compared:
        task = asyncio.current_task()
        assert task is not None
        left = iter(range(3))

        def said() -> None:
            if next(left, None) is None:
                task.cancel()

        return await compare([A], asked(), repeats=9, at_once=1, said=said, connect=connecting(a=server()))

    found = asyncio.run(work())
    assert found.interrupted
    assert 3 <= len(found.answers) < found.asked
    assert report(found, [A]).endswith("as far as it was asked")


# The command.


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "q.txt"
    file.write_text("Hello\nWhy?\n")
    return str(file)


@pytest.mark.parametrize(("other", "status"), [("text", 0), ("texts", 1)])
def test_the_exit_status_tells(
    other: str, status: int, questions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect = connecting(a=server(lambda body: "text"), b=server(lambda body: other))
    monkeypatch.setitem(servers.compare.__kwdefaults__, "connect", connect)
    command = ["audit", "--url", A, "--url", B, "--prompts", questions, "--temperature", "0", "--no-edits", "--json"]
    assert main(command) == status
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["passed"] is (status == 0)
    assert ("answers differ" in out) is (status == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", A], "give --url twice or more, or --repeats"),
        (["--url", A, "--url", A], "named twice"),
        (["smollm2", "--url", A, "--url", B], "MODEL has no effect with --url"),
        (["--url", A, "--url", B, "--drafter", "ngram"], "--drafter has no effect with --url"),
        (["--url", A, "--url", B, "--max-draft", "3"], "--max-draft has no effect"),
        (["--url", A, "--url", B, "--device", "cpu"], "--device has no effect"),
        (["--url", A, "--url", B, "--raw"], "--raw has no effect"),
        (["--url", A, "--url", B, "--places", "2"], "--places has no effect"),
        (["--url", "a", "--url", B], "an address such as"),
        (["smollm2", "--repeats", "2"], "--key, --repeats and --logprobs are for servers"),
        (["smollm2", "--logprobs"], "--key, --repeats and --logprobs are for servers"),
        ([], "name a MODEL, or servers with --url"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], message: str, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *options, "--prompts", questions]) == 2
    assert message in capsys.readouterr().err
