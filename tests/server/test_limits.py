"""What a request may ask for at most: as many sequences as the server takes, and a short list of what it ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.server.guards.json import MAX_STRINGS, check_json
from paceline.server.protocol.requests import MAX_IGNORED, MAX_IGNORED_LENGTH, ignored, listed
from paceline.server.translate.translator import Translator
from paceline.types import Request, SamplingParams
from tests.server.api import HELLO, Api, check_error, serving


@pytest.fixture
def small(llm: LLM) -> Iterator[Api]:
    """A server that takes ten sequences more than run at once."""
    with serving(llm, max_waiting=10) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["abc"] * 75}, "prompt"),
        ("/v1/completions", {"prompt": [[5, 6]] * 38, "n": 2}, "prompt"),
        ("/v1/completions", {"prompt": "abc", "n": 75}, "n"),
        ("/v1/chat/completions", {"messages": HELLO, "n": 75}, "n"),
    ],
)
def test_what_can_never_fit_is_refused_for_good(
    small: Api, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle server says 400, not 429: who comes again is refused again. No text is tokenised before."""

    async def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised")

    assert small.bridge.llm.engine.max_sequences == 64
    monkeypatch.setattr(Translator, "encode_text", never)
    monkeypatch.setattr(Translator, "encode_messages", never)
    response = small.post(path, body | {"max_tokens": 1})
    assert response.status_code == 400
    assert "retry-after" not in response.headers
    error = check_error(response)
    assert error["param"] == param
    assert "74 (64 run, 10 wait)" in error["message"]


def test_what_just_fits_is_answered(small: Api) -> None:
    assert len(small.complete(prompt=["abc"] * 37, n=2, max_tokens=1)["choices"]) == 74


def test_what_could_fit_later_comes_again(small: Api) -> None:
    async def crowd() -> Any:
        small.bridge.max_waiting = 10
        async with small.bridge.submit(Request(id="crowd", prompt=(5, 6), sampling=SamplingParams(n=74))):
            return await small.http.post("/v1/completions", json={"prompt": "abc"})

    assert small.run(crowd()).status_code == 429


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_the_list_of_ignored_fields_is_short(api: Api, path: str) -> None:
    own: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    }
    many = {f"{i:05}": 0 for i in range(MAX_STRINGS - 200)} | {"x" * 1000: 0}
    response = api.post(path, {"speculation": {"odd": 1}} | own.get(path, {"prompt": "abc"}) | many)
    assert response.status_code == 200, response.text
    names = response.json()["ignored_fields"]
    assert len(names) == MAX_IGNORED + 1
    assert names[-1].startswith("… and 49")
    assert len(response.content) < 20_000


def test_names_are_listed_in_order_and_cut() -> None:
    assert listed([]) == []
    assert listed(["b", "a", "b"]) == ["a", "b"]
    assert listed(["y" * MAX_IGNORED_LENGTH, "z" * 999]) == ["y" * 100, "z" * 99 + "…"]
    drawn = iter(f"{i:03}" for i in range(1000))
    assert listed(drawn) == [*(f"{i:03}" for i in range(MAX_IGNORED)), f"… and {1000 - MAX_IGNORED} more"]


def test_a_body_with_too_many_names_is_not_parsed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.guards.json._parse", ignored)  # would fail
    body = json.dumps({"prompt": "abc"} | {f"x{i}": 0 for i in range(MAX_STRINGS)}).encode()
    assert "names and texts, 50000 are allowed" in api.refused("/v1/completions", content=body)["message"]


def test_quotes_in_a_text_are_not_names() -> None:
    check_json(json.dumps({"prompt": '"' * 4 * MAX_STRINGS}).encode(), max_depth=2, max_values=1 << 18)
