"""One request, to servers that answer well and to servers that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from paceline.bench.client import Client, RequestOutcome, body, root_of
from paceline.bench.workloads import BenchPrompt
from paceline.errors import InvalidRequest
from tests.bench.fake_server import END, STREAM, Answer, Body, FakeServer, delta, event, good, piece, plain, serving

PROMPT = BenchPrompt("a", "chat", messages=({"role": "user", "content": "hello"},), max_tokens=5, seed=3)
FINISH = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})


def ask(answer: Answer, *, timeout: float = 100.0) -> RequestOutcome:
    async def once(url: str) -> RequestOutcome:
        client = Client(url, timeout=timeout)
        try:
            return await client.send(PROMPT, {"model": "m"})
        finally:
            await client.close()

    with serving(FakeServer(answer)) as server:
        return asyncio.run(once(server.url))


def sends(*pieces: bytes | None) -> Answer:
    def answer(body: Body, number: int) -> Iterator[bytes | None]:
        yield from pieces

    return answer


def test_what_came_and_when() -> None:
    outcome = ask(good(words=4))
    assert outcome.good
    assert (outcome.text, outcome.finish) == ("w0 w1 w2 w3 ", "length")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.chunks) == (7, 8, 4)
    assert len(outcome.gaps) == 3  # the chunk with the role is no token
    assert 0 < outcome.ttft < outcome.latency
    assert outcome.ttft + sum(outcome.gaps) == pytest.approx(outcome.latency)
    assert outcome.tpot == pytest.approx((outcome.latency - outcome.ttft) / 7)


def test_a_chunk_may_be_cut_anywhere_and_comments_are_passed_over() -> None:
    line = b': ping\n\ndata: {"choices": [{"delta": {"content": "h\xc3\xa9"}}]}\n\n'
    cut = line.index(b"\xa9")
    outcome = ask(sends(STREAM + piece(line[:cut]), piece(line[cut:]), FINISH, event(b"[DONE]") + END))
    assert outcome.good
    assert outcome.text == "hé"


def test_tokens_of_each_chunk_where_the_server_counts_them() -> None:
    pieces = [delta("a", usage={"completion_tokens": 1}), delta("bcd", usage={"completion_tokens": 4})]
    assert ask(sends(STREAM, *pieces, FINISH, event(b"[DONE]") + END)).chunk_tokens == [1, 3]


def test_without_usage_chunks_count() -> None:
    outcome = ask(sends(STREAM, delta("a"), delta("b"), FINISH, event(b"[DONE]") + END))
    assert (outcome.output_tokens, outcome.counted) == (2, False)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([STREAM + delta("a") + event(b'{"choices": [')], "the stream broke after 1 chunks"),
        ([STREAM + delta("a") + event([1])], "the server gave up"),
        ([STREAM + delta("a") + event({"choices": 5})], "is no chunk of OpenAI's"),
        ([STREAM + delta("a"), event({"usage": {"completion_tokens": None}})], "is no chunk of OpenAI's"),
        ([STREAM + delta("a"), event({"error": {"message": "out of memory"}})], "out of memory"),
        ([STREAM + delta("a") + delta("b"), None], "the connection broke after 2 chunks"),
        ([STREAM + delta("a") + END], "ended after 1 chunks without saying"),
        ([STREAM + FINISH + event(b"[DONE]") + END], "has no text"),
        ([None], "the connection broke after 0 chunks"),
        ([plain(429, '{"error": {"message": "too many"}}')], "429: too many"),
        ([plain(500, "<html>")], "500: <html>"),
        ([plain(200, '{"choices": []}')], "ended after 0 chunks"),
    ],
)
def test_failures_are_outcomes(pieces: list[bytes | None], message: str) -> None:
    outcome = ask(sends(*pieces))
    assert outcome.error is not None
    assert message in outcome.error
    assert not outcome.unreachable


def test_a_server_that_falls_silent() -> None:
    def answer(body: Body, number: int) -> Iterator[bytes]:
        yield STREAM + delta("a")
        for _ in range(200):
            yield b""

    outcome = ask(answer, timeout=0.05)
    assert outcome.error is not None
    assert "the connection broke after 1 chunks" in outcome.error


def test_nobody_there() -> None:
    async def once() -> RequestOutcome:
        client = Client("http://127.0.0.1:9", timeout=2)
        try:
            return await client.send(PROMPT, {})
        finally:
            await client.close()

    outcome = asyncio.run(once())
    assert outcome.unreachable
    assert not outcome.good


def test_addresses() -> None:
    for url in (
        "http://h:1",
        "http://h:1/",
        "http://h:1/v1",
        "http://h:1/v1/chat/completions",
        "http://h:1/v1/completions",
    ):
        assert root_of(url) == "http://h:1"
    for url in ("h:1", "ftp://h"):
        with pytest.raises(InvalidRequest, match="an address such as"):
            root_of(url)
    with pytest.raises(InvalidRequest, match="is no address"):
        Client("http://h:port")


def test_bodies() -> None:
    recorded = BenchPrompt("r", "chat", tokens=(1, 2), max_tokens=5)
    assert body(PROMPT, "chat", {"seed": 9})["seed"] == 9
    assert body(PROMPT, "completions", {})["prompt"] == "hello"
    assert body(recorded, "completions", {})["prompt"] == [1, 2]
    with pytest.raises(InvalidRequest, match="--endpoint completions"):
        body(recorded, "chat", {})
