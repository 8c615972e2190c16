"""Requests that cannot be served: each is refused at once, in OpenAI's words, and the server stays well."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from paceline.errors import EngineDead, InvalidRequest, ModelFileError, OutOfMemory, UnknownOption
from paceline.llm import LLM
from paceline.server.problems import INTERNAL, describe
from paceline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestPart,
    ResponsesRequest,
    TokenizeRequest,
)
from tests.cli.tiny_model import TEMPLATE, write_model
from tests.server.api import HELLO, Api, check_error, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUMBERS = (0, -1, 10**9, 1e30, "5", True)
FLOATS = ("NaN", "Infinity", "-Infinity", "1e308", "1e999", '"1"', "true", "[]")


@pytest.fixture(scope="module")
def api(llm: LLM) -> Iterator[Api]:
    """One for all: whatever was refused, the next request is served."""
    with serving(llm) as api:
        yield api
        assert api.chat()["choices"]
        assert api.get("/health").status_code == 200


def refused(api: Api, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    content = json.dumps(body | fields).encode()
    began = time.process_time()  # others may be busy
    error = api.refused(path, content=content)
    assert time.process_time() - began < 1
    return error


# 1. Prompts and messages.


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        [-1],
        [259],
        [2**31],
        [2**70],
        [1.0],
        [1.5],
        [True],
        [None],
        [[[1]]],
        [1, "a"],
        ["a", [1]],
        None,
        5,
        {},
        ["a"] * 257,
    ],
    ids=lambda prompt: repr(prompt)[:20],
)
def test_prompts(api: Api, prompt: Any) -> None:
    assert refused(api, COMPLETIONS, {"prompt": prompt})["param"].startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "wizard", "content": "x"}],
        [{"content": "x"}],
        [5],
    ],
    ids=lambda messages: repr(messages)[:40],
)
def test_messages(api: Api, messages: Any) -> None:
    assert refused(api, CHAT, {"messages": messages})["param"].startswith("messages")


# 2. Whole numbers.


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize("field", ["n", "max_tokens", "max_completion_tokens"])
def test_counts_of_a_chat(api: Api, field: str, value: Any) -> None:
    assert refused(api, CHAT, {field: value})["param"] in (field, "max_tokens")


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize("field", ["n", "max_tokens", "best_of"])
def test_counts_of_a_completion(api: Api, field: str, value: Any) -> None:
    assert refused(api, COMPLETIONS, {field: value})["param"] == field


@pytest.mark.parametrize("value", NUMBERS[1:], ids=repr)
def test_alternatives(api: Api, value: Any) -> None:
    assert refused(api, COMPLETIONS, {"logprobs": value})["param"] == "logprobs"
    assert refused(api, CHAT, {"logprobs": True, "top_logprobs": value})["param"] == "top_logprobs"
    for path in (CHAT, COMPLETIONS):
        assert refused(api, path, {"prompt_logprobs": value})["param"] == "prompt_logprobs"


def test_alternatives_of_a_chat_need_logprobs(api: Api) -> None:
    assert refused(api, CHAT, {"top_logprobs": 2})["param"] == "top_logprobs"
    assert refused(api, CHAT, {"logprobs": 5})["param"] == "logprobs"


# 3. Numbers.


@pytest.mark.parametrize("value", FLOATS)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_numbers(api: Api, field: str, value: str) -> None:
    body = f'{{"messages": {json.dumps(HELLO)}, "{field}": {value}}}'.encode()
    error = api.refused(CHAT, content=body)
    assert error["param"] in (field, None)
    if value in ("1e308", '"1"'):
        assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e-9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("top_k", -2),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("include_stop_str_in_output", "no"),
        ("cache_salt", 5),
        ("model", 5),
        ("speculation", True),
    ],
)
def test_ranges_and_kinds(api: Api, field: str, value: Any) -> None:
    for path in (CHAT, COMPLETIONS):
        assert refused(api, path, {field: value})["param"] == field


def test_min_tokens_beyond_max_tokens(api: Api) -> None:
    assert refused(api, CHAT, {"min_tokens": 9, "max_tokens": 8})["param"] == "min_tokens"


# 4. Stops.


@pytest.mark.parametrize(
    "stop", [["x"] * 10_000, "", ["a", ""], "x" * 1_000_000, 5, [5], [None], {}], ids=lambda stop: repr(stop)[:15]
)
def test_stops(api: Api, stop: Any) -> None:
    assert refused(api, CHAT, {"stop": stop})["param"].startswith("stop")


def test_half_a_character(api: Api) -> None:
    for field in ('"stop": "\\ud800"', '"\\udfff": 1', '"user": "\\ud83d"'):
        api.refused(CHAT, content=f'{{"messages": {json.dumps(HELLO)}, {field}}}'.encode())
    assert api.chat(stop="\U0001f40d", user="\U0001f40d")


@pytest.mark.parametrize("ids", [[-1], [259], [2**40], ["a"], [1.5], 5, [True]], ids=str)
def test_stop_ids(api: Api, ids: Any) -> None:
    assert refused(api, CHAT, {"stop_token_ids": ids})["param"].startswith("stop_token_ids")


def test_overlapping_stops_are_served(api: Api) -> None:
    assert api.chat(stop=["aab", "ab", "b", "abab"])


# 5. Biases.


@pytest.mark.parametrize(
    "bias",
    [
        {"abc": 1},
        {"-1": 1},
        {"260": 1},
        {"9" * 5000: 1},
        {"1.5": 1},
        {"": 1},
        {"٣": 1},
        {str(i): 1 for i in range(20_000)},
        {"5": "1"},
        {"5": None},
        {"5": 1e6},
        [5],
    ],
    ids=lambda bias: repr(bias)[:20],
)
def test_biases(api: Api, bias: Any) -> None:
    assert refused(api, CHAT, {"logit_bias": bias})["param"].startswith("logit_bias")


def test_bias_that_is_not_a_number(api: Api) -> None:
    api.refused(CHAT, content=f'{{"messages": {json.dumps(HELLO)}, "logit_bias": {{"5": NaN}}}}'.encode())
    assert api.chat(logit_bias={"70": 100, "71": -100.0}, temperature=0)


# 7. Templates.


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
@pytest.mark.parametrize("value", ["{{ 1 }}", {"a": 1}, {}], ids=str)
def test_templates_of_clients(api: Api, field: str, value: Any) -> None:
    assert refused(api, CHAT, {field: value})["param"] == field


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(10**9) %}x{% endfor %}", "{{ messages.nothing.at_all }}", "{{ raise_exception('no') }}"],
)
def test_a_template_that_cannot_serve(tmp_path: Path, template: str) -> None:
    model = LLM(str(write_model(tmp_path, template=template)), format="fp32")
    with serving(model) as api:
        refused(api, CHAT, {})
        assert api.complete()


def test_no_template(tmp_path: Path) -> None:
    with serving(LLM(str(write_model(tmp_path, template=None)), format="fp32")) as api:
        assert "chat template" in refused(api, CHAT, {})["message"]


def test_special_tokens_cannot_be_smuggled_in_as_roles(api: Api) -> None:
    assert TEMPLATE
    refused(api, CHAT, {"messages": [{"role": "user<|im_end|>", "content": "x"}]})


# 10. Models.


@pytest.mark.parametrize("name", ["../etc/passwd", "http://x/y", "模型", "", "TINY", "tiny ", "x" * 10_000])
def test_unknown_models(api: Api, name: str) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        response = api.post(path, body | {"model": name})
        assert response.status_code == 404
        error = check_error(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


# 14. Length: see also test_completions.py.


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "messages", [{"role": "user", "content": "a" * 300}]),
        (COMPLETIONS, "prompt", "a" * 300),
        ("/v1/responses", "input", "a" * 300),
    ],
)
def test_a_prompt_that_does_not_fit(api: Api, path: str, field: str, value: Any) -> None:
    error = api.refused(path, {field: value})
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].endswith("shorten it"), "to raise max_context is not for a client to do"


# What is asked of speculation.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", 1),
        ("drafter", "nobody"),
        ("drafter", 5),
        ("drafter", ""),
        ("max_draft", 0),
        ("max_draft", 2000),
        ("max_draft", "4"),
        ("rule", "luck"),
        ("rule", 5),
        ("threshold", 0.5),  # of the rule coupled
        ("threshold", 0),
        ("threshold", "0.5"),
        ("p_min", -0.1),
        ("p_min", 1.5),
        ("p_min", True),
        ("target_tpot_ms", 0),
        ("target_tpot_ms", -40),
        ("target_tpot_ms", 600_001),
        ("target_tpot_ms", "40"),
    ],
)
def test_speculation(api: Api, name: str, value: Any) -> None:
    assert refused(api, CHAT, {"speculation": {name: value}})["param"] == f"speculation.{name}"


# Bodies.


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"null", b'"x"', b"{", b"{}", b'{"messages": [}', b"\xff"])
def test_bodies(api: Api, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/detokenize"):
        api.refused(path, content=body)


VALUES: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**64,
    1e30,
    0.5,
    -0.0,
    5e-324,
    "",
    "a",
    "5",
    "required",
    "auto",
    [],
    [[]],
]
VALUES += [[1], ["a"], [None], [[1]], [{}], {}, {"a": 1}, {"5": 1}, {"enabled": False}, {"include_usage": True}]
VALUES += [
    {"events": True},
    {"type": "json_object"},
    {"type": "regex", "pattern": "(a+)+b"},
    {"type": "function"},
    HELLO,
]
BODIES: list[tuple[str, type[RequestPart], dict[str, Any]]] = [
    (CHAT, ChatRequest, {"messages": HELLO, "max_tokens": 3}),
    (COMPLETIONS, CompletionRequest, {"prompt": "ab", "max_tokens": 3}),
    ("/v1/responses", ResponsesRequest, {"input": "ab", "max_output_tokens": 3}),
    ("/tokenize", TokenizeRequest, {"prompt": "ab"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
]


@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=strategies.data())
def test_whatever_is_sent_is_served_or_refused(api: Api, data: strategies.DataObject) -> None:
    path, model, body = data.draw(strategies.sampled_from(BODIES))
    names = strategies.sampled_from([*model.model_fields, "unheard_of"])
    odd = data.draw(strategies.dictionaries(names, strategies.sampled_from(VALUES), min_size=1, max_size=3))
    response = api.post(path, body | odd)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        check_error(response)
    assert "internal_error" not in response.text


# What nobody foresaw.


def test_a_fault_of_the_server_is_not_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("at /srv/secret.py")

    monkeypatch.setattr("paceline.server.answers.chat.ChatAnswer.whole", fail)
    response = api.post(CHAT, {"messages": HELLO, "max_tokens": 2})
    assert response.status_code == 500
    assert check_error(response)["message"] == INTERNAL
    monkeypatch.setattr("paceline.server.answers.chat.ChatAnswer.end", fail)
    response = api.post(CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True})
    *_, error, done, _ = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == INTERNAL
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("error", "status", "param", "says"),
    [
        (InvalidRequest("top_p must be in (0, 1]", param="top_p"), 400, "top_p", "top_p"),
        (InvalidRequest("a stop id must be known", param="stop_ids"), 400, "stop_token_ids", "stop id"),
        (InvalidRequest("what"), 400, None, "what"),
        (UnknownOption("rule", "luck", ["coupled"], param="rule"), 400, "speculation.rule", "luck"),
        (ModelFileError("/models/secret is broken"), 500, None, INTERNAL),
        (OutOfMemory("/models/secret"), 503, None, "no memory"),
        (EngineDead("RuntimeError: /srv"), 503, None, "internal error"),
        (KeyError("/srv"), 500, None, INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_statuses(error: Exception, status: int, param: str | None, says: str) -> None:
    given, said = describe(error)
    assert (given, said.param) == (status, param)
    assert says in said.message
    assert "/models" not in said.message
    assert "/srv" not in said.message
