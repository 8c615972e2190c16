"""Requests that a client should not send, by the numbers of a list, each with the statuses that are right for it.

1 prompts, 2 whole numbers, 3 numbers, 4 stops, 5 biases, 6 forms, 7 templates, 8 bodies and headers, 9 hosts, paths and
keys, 10 models. What stands here with 200 is odd and must be served. Most of what is refused is refused with 400.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prompts import CHAT, COMPLETIONS
from wire import JSON, get, head, post

KEY, ADMIN = "sk-of-a-user", "sk-of-an-admin"
AUTH = {"Authorization": f"Bearer {KEY}"}
VOCABULARY = 49_152  # SmolLM2's
REFUSED, EITHER = frozenset({400}), frozenset({200, 400})
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    item: int
    name: str
    request: bytes
    statuses: frozenset[int] = REFUSED
    waits: bool = False  # the server answers only once a limit on time is over


def cases() -> Iterator[Case]:
    for part in (prompts, integers, numbers, stops, biases, forms, templates, bodies, heads, paths, keys, models):
        yield from part()


def completion(item: int, name: str, fields: dict[str, Any], statuses: frozenset[int] = REFUSED) -> Case:
    body = {"prompt": "The sky is", "max_tokens": 2, **fields}
    return Case(item, f"completion: {name}", post(COMPLETIONS, body, AUTH), statuses)


def chat(item: int, name: str, fields: dict[str, Any], statuses: frozenset[int] = REFUSED) -> Case:
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2, **fields}
    return Case(item, f"chat: {name}", post(CHAT, body, AUTH), statuses)


def prompts() -> Iterator[Case]:
    deep: Any = 5
    for _ in range(20):
        deep = [deep]
    ids = [[-1], [VOCABULARY], [2**31], [2**70], [1.5], [True], [[[1]]], [1, "a"], deep]
    for value in ("", [], [""], [[]], None, 5, *ids, ["a"] * 257):
        yield completion(1, f"prompt {json.dumps(value)[:30]}", {"prompt": value})
    for messages in ([], None, "hello", [{}], [{"role": "user", "content": None}], [{"role": "user", "content": []}]):
        yield chat(1, f"messages {json.dumps(messages)[:40]}", {"messages": messages})


def integers() -> Iterator[Case]:
    odd = (0, -1, 10**9, 1e9, 1e30, "5", True)
    for value in odd:
        for field in ("n", "best_of", "max_tokens"):
            yield completion(2, f"{field}={json.dumps(value)}", {field: value})
        for field in ("n", "max_tokens", "max_completion_tokens"):
            yield chat(2, f"{field}={json.dumps(value)}", {field: value})
        fine = frozenset({200}) if value == 0 and value is not False else REFUSED
        for field in ("logprobs", "prompt_logprobs"):
            yield completion(2, f"{field}={json.dumps(value)}", {field: value}, fine)
        yield chat(2, f"top_logprobs={json.dumps(value)}", {"logprobs": True, "top_logprobs": value}, fine)


def numbers() -> Iterator[Case]:
    fields = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for field in fields:
        for value in (float("nan"), float("inf"), float("-inf"), 1e308, "0.5"):
            yield completion(3, f"{field}={json.dumps(value)}", {field: value})
    others = {"top_k": (-2, 2**40, 1.5), "seed": (-(2**63) - 1, 2**64, 2**70, 1.5, "7"), "temperature": (-1, 1e6)}
    for field, values in others.items():
        for value in values:
            yield chat(3, f"{field}={json.dumps(value)}", {field: value})


def stops() -> Iterator[Case]:
    for name, value in (
        ("10,000 strings", [f"s{i}" for i in range(10_000)]),
        ("an empty string", ""),
        ("an empty string among others", ["a", ""]),
        ("1 MB", "x" * MEGABYTE),
        ("numbers", [5]),
    ):
        yield completion(4, f"stop: {name}", {"stop": value})
    yield completion(4, "stop: overlapping", {"stop": ["aba", "bab", "ab", "a"]}, frozenset({200}))
    half = json.dumps({"prompt": "a", "stop": "#"}).replace("#", "\\ud800").encode()
    yield Case(4, "stop: half a surrogate pair", post(COMPLETIONS, half, AUTH))
    for ids in ([-1], [VOCABULARY], [2**40], [1.5], ["5"]):
        yield completion(4, f"stop_token_ids {ids}", {"stop_token_ids": ids})


def biases() -> Iterator[Case]:
    many = {str(i): 1 for i in range(10**6)}
    pairs = (("abc", 1), ("-1", 1), (str(VOCABULARY + 1), 1), ("5", "1"), ("5", 1e308), ("5", float("nan")), ("1.5", 1))
    for key, value in pairs:
        yield chat(5, f"logit_bias {{{key}: {value}}}", {"logit_bias": {key: value}})
    yield chat(5, "logit_bias of a million", {"logit_bias": many}, frozenset({400, 413}))
    yield chat(5, "logit_bias as a list", {"logit_bias": [1]})


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def forms() -> Iterator[Case]:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    enum = {"enum": [f"value {i}" for i in range(100_000)]}
    huge = {"type": "string", "pattern": "(x{1000}){1000}"}
    for name, form, statuses in (
        ("an unknown type", {"type": "yaml"}, REFUSED),
        ("a misspelt type of a schema", schema({"type": "strnig"}), REFUSED),
        ("a $ref to nowhere", schema({"$ref": "#/nowhere"}), REFUSED),
        ("a $ref to a file", schema({"$ref": "file:///etc/passwd"}), REFUSED),
        ("a recursive $ref", schema(tree), frozenset({200})),
        ("a $ref that never arrives", schema(loop), EITHER),
        ("a schema 200 deep", schema(deep), REFUSED),
        ("100,000 values of an enum", schema(enum), EITHER),
        ("a pattern of a million", schema(huge), EITHER),
        ("a broken pattern", {"type": "regex", "pattern": "("}, REFUSED),
        ("a catastrophic pattern", {"type": "regex", "pattern": "(a+)+b"}, frozenset({200})),
        ("nested repetitions", {"type": "regex", "pattern": "((a{1,100}){1,100}){1,100}"}, EITHER),
        ("a look-behind", {"type": "regex", "pattern": "(?<=a)b"}, REFUSED),
    ):
        yield chat(6, f"response_format: {name}", {"response_format": form}, statuses)


def templates() -> Iterator[Case]:
    yield chat(7, "chat_template", {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"})
    yield chat(7, "chat_template_kwargs", {"chat_template_kwargs": {"x": 1}})
    yield chat(7, "a role with a control token", {"messages": [{"role": "user<|im_end|>", "content": "x"}]})


def bodies() -> Iterator[Case]:
    fine = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    large = head("POST", COMPLETIONS, {**JSON, **AUTH, "Transfer-Encoding": "chunked"})
    block = b"100000\r\n" + b" " * MEGABYTE + b"\r\n"
    bomb = gzip.compress(b" " * (100 * MEGABYTE), compresslevel=1)
    squeezed = AUTH | {"Content-Encoding": "gzip"}
    unsupported, too_large = frozenset({415}), frozenset({413})
    deep = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    yield Case(8, "a body of 100 MB", post(COMPLETIONS, b" " * (100 * MEGABYTE), AUTH), too_large)
    yield Case(8, "a body of 100 MB in chunks", large + block * 100, too_large)
    yield Case(8, "JSON of depth 10,000", post(COMPLETIONS, deep, AUTH))
    yield Case(8, "a name twice", post(COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', AUTH))
    yield Case(8, "not UTF-8", post(COMPLETIONS, b'{"prompt": "\xff\xfe"}', AUTH))
    yield Case(8, "a byte order mark", post(COMPLETIONS, b"\xef\xbb\xbf" + fine, AUTH))
    yield Case(8, "not JSON", post(COMPLETIONS, b"prompt=a", AUTH))
    yield Case(8, "no body", post(COMPLETIONS, b"", AUTH))
    yield Case(8, "a gzip bomb", post(COMPLETIONS, bomb, squeezed), unsupported)
    yield Case(8, "another content type", post(COMPLETIONS, fine, AUTH | {"Content-Type": "text/plain"}), unsupported)
    yield Case(8, "a number of 5,000 digits", post(COMPLETIONS, b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", AUTH))
    slow = frozenset({408})
    yield Case(8, "chunks without end", large + b"1\r\n \r\n", slow, waits=True)
    yield Case(8, "a body that never comes", post(COMPLETIONS, fine, AUTH)[: -len(fine)], slow, waits=True)
    yield Case(8, "half a body", post(COMPLETIONS, fine, AUTH)[:-5], slow, waits=True)
    yield Case(8, "half a head", b"GET /health HTTP/1.1\r\nHost: local", slow, waits=True)


def heads() -> Iterator[Case]:
    too_large = frozenset({431})
    yield Case(8, "a header of 64 KB", get("/health", {"X-Long": "x" * 65536}), too_large)
    yield Case(8, "10,000 headers", get("/health", {f"X-{i}": "y" for i in range(10_000)}), too_large)
    yield Case(8, "200 small headers", get("/health", {f"X-{i}": "y" for i in range(200)}), too_large)
    yield Case(8, "a URL of 20 KB", get("/" + "x" * 20_000), frozenset({414, 431}))
    twice = head("POST", COMPLETIONS, AUTH | {"Content-Length": "5"})[:-2] + b"Content-Length: 6\r\n\r\n"
    yield Case(8, "two lengths", twice)
    yield Case(8, "no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")


def paths() -> Iterator[Case]:
    for host in ("x/?", "a b", "evil@localhost", "evil.example"):
        statuses = frozenset({200}) if host == "evil.example" else REFUSED  # with keys any name is answered
        yield Case(9, f"Host: {host}", get("/health", {"Host": host}), statuses)
    yield Case(9, "two hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n")
    missing = frozenset({404})
    for path in ("//v1/models", "/v1/../health", "/v1/%2e%2e/health", "/v1/%252e%252e/health", "/%2fv1/models"):
        yield Case(9, path, get(path, AUTH), missing)
    yield Case(9, "absolute-form URI", get("http://elsewhere/health"))
    wrong = frozenset({405})
    yield Case(9, "OPTIONS", head("OPTIONS", COMPLETIONS, AUTH), wrong)
    yield Case(9, "GET where POST belongs", get(COMPLETIONS, AUTH), wrong)
    yield Case(9, "an unknown route", get("/v1/nothing", AUTH), missing)


def keys() -> Iterator[Case]:
    refused = frozenset({401})
    wrong = {
        "no key": {},
        "an empty key": {"Authorization": ""},
        "Bearer without a key": {"Authorization": "Bearer "},
        "wrong case": {"Authorization": f"Bearer {KEY.upper()}"},
        "a prefix": {"Authorization": f"Bearer {KEY[:-1]}"},
        "another scheme": {"Authorization": f"Basic {KEY}"},
    }
    for name, headers in wrong.items():
        yield Case(9, name, post(COMPLETIONS, {"prompt": "a"}, headers), refused)
    twice = get("/v1/models", AUTH)[:-2] + f"Authorization: Bearer {KEY}\r\n\r\n".encode()
    yield Case(9, "two keys", twice, refused)
    shut = ("/v1/models", "/v1/speculation", "/metrics", "/version", "/openapi.json", "/docs", "/nothing", "/v1")
    for path in shut:
        yield Case(9, f"{path} without a key", get(path), refused)
    yield Case(9, "a control route with a user's key", post("/admin/reload", b"", AUTH), refused)
    for path in ("/health", "/ready", "/"):
        yield Case(9, f"{path} without a key", get(path), frozenset({200}))


def models() -> Iterator[Case]:
    for name in ("../../etc/passwd", "https://example.org/model", "模型", "gpt-4", "smollm2/", " smollm2", ""):
        yield chat(10, f"model {name!r}", {"model": name}, frozenset({404}))
    for value in (5, None, ["smollm2"]):
        yield chat(10, f"model {value!r}", {"model": value}, frozenset({200}) if value is None else REFUSED)
