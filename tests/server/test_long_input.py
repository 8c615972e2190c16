"""Long input over HTTP, by counts: what reaches the tokenizer, which thread works, and what is held afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from starlette.requests import Request

from paceline.llm import LLM
from paceline.server.guards import bodies
from paceline.server.guards import json as json_guard
from paceline.server.guards.bodies import LONG_BODY, Bodies
from paceline.server.guards.check import Refusal
from paceline.server.guards.json import MAX_STRINGS, Shape, check_json
from paceline.server.lane import Lane
from paceline.server.translate.encoding import LONG_TEXT
from paceline.text.tokenizer import Tokenizer
from tests.server.api import HELLO, Api, serving
from tests.server.guarded import JSON, aio, an_app, call

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


class Reached:
    """The texts that a tokenizer encodes, each with the name of the thread."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, str]] = []

    @property
    def characters(self) -> int:
        return sum(size for size, _ in self.texts)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Reached:
    seen, encode = Reached(), Tokenizer._plain

    def counted(self: Tokenizer, text: str, **options: Any) -> Any:
        for end, ids in encode(self, text, **options):
            seen.texts.append((len(text), threading.current_thread().name))
            yield end, ids

    monkeypatch.setattr(Tokenizer, "_plain", counted)
    return seen


def long_bodies(text: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """By name: path, field at fault, body."""
    predicted = {"messages": HELLO, "prediction": {"type": "content", "content": text}}
    return {
        "prompt": (COMPLETIONS, "prompt", {"prompt": text}),
        "message": (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
        "input": ("/v1/responses", "input", {"input": text}),
        "prediction": (CHAT, "prediction", predicted),
    }


@pytest.mark.parametrize("name", ["prompt", "message", "input", "prediction"])
@pytest.mark.parametrize("text", ["a " * 500_000, "a" * 1_000_000, "\n" * 1_000_000, "\U0001f600" * 100_000])
def test_a_megabyte_never_reaches_the_tokenizer(api: Api, reached: Reached, name: str, text: str) -> None:
    path, field, body = long_bodies(text)[name]
    error = api.refused(path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "characters and at least" in error["message"]
    assert reached.characters <= 200  # of the other messages of the body


def test_tokenize_takes_so_much(llm: LLM, reached: Reached) -> None:
    with serving(llm, max_tokenize_bytes=1000) as api:
        for body in ({"prompt": "é" * 501}, {"messages": [{"role": "user", "content": "a" * 1001}]}):
            error = api.refused(TOKENIZE, body)
            assert "bytes, 1000 are allowed: tokenise it in parts" in error["message"]
            assert error["param"] == next(iter(body))
        assert not reached.texts
        assert api.post(TOKENIZE, {"prompt": "é" * 500}).json()["count"] == 1000  # more than the context is fine


def test_a_prompt_of_too_many_ids_is_refused_by_its_length(api: Api) -> None:
    error = api.refused(COMPLETIONS, {"prompt": [65] * 100_000})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"].startswith("the prompt has 100000 tokens; the context holds")


def test_long_texts_are_tokenised_apart_from_the_event_loop(api: Api, reached: Reached) -> None:
    for size in (LONG_TEXT - 1, LONG_TEXT):
        assert api.post(TOKENIZE, {"prompt": "a" * size}).json()["count"] == size
    threads = [name.partition("_")[0] for _, name in reached.texts]
    assert threads == ["MainThread", "long-input"]


def test_long_inputs_take_turns_the_smallest_first() -> None:
    lane, order = Lane("turns"), list[int]()

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(lane.do(lambda size=size: order.append(size), size=size)) for size in (5, 4, 9, 2)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await lane.do(lambda: order.append(0), size=0)

    aio(all_of_them())
    assert order == [5, 2, 9, 0]


# ── bodies ──


def test_a_long_body_is_parsed_once_and_apart_from_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parsed(body: bytes, **limits: int) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return check_json(body, **limits)

    async def again(_: Request) -> Any:
        raise AssertionError("a route parses the body again")

    monkeypatch.setattr(bodies, "check_json", parsed)
    monkeypatch.setattr(Request, "json", again)
    for size in (10, LONG_BODY):
        assert api.post(TOKENIZE, {"prompt": "a" * size}).json()["count"] == size
    assert threads == ["MainThread", "long-input"]


def slow_shape(body: bytes) -> tuple[int, int, int, int]:
    inside = escaped = False
    level = depth = containers = quotes = commas = 0
    for byte in body:
        if inside:
            inside = escaped or byte != ord('"')
            quotes += not inside
            escaped = byte == ord("\\") and not escaped
        elif byte == ord('"'):
            inside, quotes = True, quotes + 1
        elif byte in b"[{":
            level, containers = level + 1, containers + 1
            depth = max(depth, level)
        elif byte in b"]}":
            level -= 1
        commas += byte == ord(",") and not inside
    return depth, containers, quotes, commas


def any_json(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.4:
        return "".join(chance.choices('ab"\\[]{},é\n', k=chance.randrange(9)))
    items = [any_json(chance, depth + 1) for _ in range(chance.randrange(4))]
    return items if kind < 0.7 else {f'{i}"\\': item for i, item in enumerate(items)}


@pytest.mark.parametrize("part", [1, 2, 3, 7, 64, 1 << 18])
def test_a_scan_counts_as_a_parser_does(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(json_guard, "SCAN_BYTES", part)
    chance = random.Random(part)
    for _ in range(100):
        body = json.dumps(any_json(chance), ensure_ascii=chance.random() < 0.5).encode()
        found = Shape.of(body)
        assert (found.depth, found.containers, found.quotes, found.commas) == slow_shape(body), body


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"prompt": "' + b'\\"' * 4_000_000, "is not valid JSON"),
        (b'{"prompt": "' + b"\\" * 8_000_000, "is not valid JSON"),
        (b'{"prompt": [' + b'"a",' * 2_000_000, f"2000001 names and texts, {MAX_STRINGS} are allowed"),
        (b'{"prompt": [' + b"1," * 4_000_000, "4000003 values, 262144 are allowed"),
    ],
)
def test_bodies_that_take_a_parser_long_are_refused_by_counts(
    monkeypatch: pytest.MonkeyPatch, body: bytes, problem: str
) -> None:
    scanned: list[int] = []
    quotes = json_guard._quotes
    monkeypatch.setattr(json_guard, "_quotes", lambda part, slashes: scanned.append(len(part)) or quotes(part, slashes))
    with pytest.raises(Refusal, match=problem):
        check_json(body, max_depth=64, max_values=1 << 18)
    assert sum(scanned) == len(body)


def test_bodies_of_all_requests_together_are_bounded() -> None:
    app = an_app(max_bodies_bytes=300_000)

    async def both() -> list[Any]:
        asked = (call(app, "POST", "/v1/echo", json={"a": "x" * 200_000}) for _ in range(2))
        return await asyncio.gather(*asked)

    refused, taken = sorted(aio(both()), key=lambda answer: -answer.status_code)
    assert (taken.status_code, refused.status_code) == (200, 429)
    assert refused.json()["error"]["code"] == "too_many_bytes"
    assert refused.headers["retry-after"] == "1"
    alone = aio(call(app, "POST", "/v1/echo", json={"a": "x" * 400_000}))
    assert alone.status_code == 200, "a body alone is bounded by max_body_bytes"


def test_nothing_of_a_body_is_counted_once_its_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[Bodies] = []
    made = Bodies.__init__

    def kept(self: Bodies, *args: Any, **options: Any) -> None:
        guards.append(self)
        made(self, *args, **options)

    monkeypatch.setattr(Bodies, "__init__", kept)
    app = an_app(max_body_bytes=1000, max_json_depth=2)
    for body in (b'{"a": 1}', b'{"a": ', b"[[[]]]", b'"' + b"x" * 5000 + b'"'):
        aio(call(app, "POST", "/v1/echo", content=body, headers=JSON))
    assert [guard.held for guard in guards] == [0]


def test_many_long_texts_at_once_leave_nothing_behind(llm: LLM) -> None:
    before = threading.active_count()
    with serving(llm) as api:
        requests = [body for _, _, body in long_bodies("a " * 100_000).values()] * 4
        paths = [path for path, _, _ in long_bodies("").values()] * 4

        async def all_of_them() -> list[int]:
            asked = (api.http.post(path, json=body) for path, body in zip(paths, requests, strict=True))
            return [answer.status_code for answer in await asyncio.gather(*asked)]

        assert api.run(all_of_them()) == [400] * 16
        assert api.complete()["choices"]
    assert threading.active_count() - before < 12
