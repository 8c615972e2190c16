"""/v1/embeddings: OpenAI's forms of input and output, limits, and running streams beside it."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.llm import LLM
from paceline.server.record import Recorder
from tests.cli.tiny_model import HIDDEN
from tests.server.api import Api, serving, text_of

PATH = "/v1/embeddings"
TEXTS = ["hello there", "something else", "one", "other"]


@pytest.fixture(scope="module")
def known(llm: LLM) -> dict[str, np.ndarray]:
    """Embeddings that the engine makes offline, before any server steps it."""
    long = "a" * (llm.parts.memory.max_context - 1)
    found = {text: np.array(vector) for text, vector in zip(TEXTS, llm.embed(TEXTS), strict=True)}
    return found | {"last": np.array(llm.embed("hello", pooling="last")[0]), "long": np.array(llm.embed(long)[0])}


def embedded(api: Api, input: Any, **fields: Any) -> dict[str, Any]:
    response = api.post(PATH, {"input": input, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def vectors(answer: dict[str, Any]) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == [*range(len(answer["data"]))]
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    return np.array([each["embedding"] for each in answer["data"]])


def test_every_form_of_input(known: dict[str, np.ndarray], api: Api, llm: LLM) -> None:
    texts = TEXTS[:2]
    expected = np.array([known[text] for text in texts])
    ids = [llm.tokenizer.encode(text) for text in texts]
    assert expected.shape == (2, HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1)
    for given, wanted in ((texts, expected), (texts[0], expected[:1]), (ids, expected), (ids[1], expected[1:])):
        answer = embedded(api, given)
        np.testing.assert_allclose(vectors(answer), wanted, atol=1e-5)
        assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": len(ids[1]), "total_tokens": len(ids[1])}
    assert not np.allclose(expected[0], expected[1], atol=1e-3)


def test_base64_is_little_endian_float32(api: Api) -> None:
    [data] = embedded(api, "hello", encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(data["embedding"]), dtype="<f4")
    np.testing.assert_allclose(found, vectors(embedded(api, "hello", encoding_format="float"))[0], atol=1e-6)


def test_the_last_state_by_a_setting(known: dict[str, np.ndarray], llm: LLM) -> None:
    with serving(llm, embedding_pooling="last") as api:
        np.testing.assert_allclose(vectors(embedded(api, "hello"))[0], known["last"], atol=1e-5)


def test_beside_a_stream_nothing_changes(api: Api) -> None:
    alone = text_of(api.complete_stream(max_tokens=60, temperature=0))
    expected = vectors(embedded(api, "x" * 200))

    async def both() -> tuple[Any, Any]:
        stream = {"prompt": "abcabcabc", "max_tokens": 60, "seed": 1, "temperature": 0, "stream": False}
        return await asyncio.gather(
            api.http.post("/v1/completions", json=stream), api.http.post(PATH, json={"input": ["x" * 200] * 3})
        )

    answer, found = api.run(both())
    assert answer.json()["choices"][0]["text"] == alone
    np.testing.assert_allclose(vectors(found.json()), expected.repeat(3, axis=0), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [5, 10**9]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_refused(api: Api, fields: dict[str, Any], param: str) -> None:
    error = api.refused(PATH, fields)
    assert (error["param"] or "model").split(".")[0] == param
    assert "prompt" not in error["message"] or param == "input"


def test_more_texts_than_an_idle_server_takes(llm: LLM) -> None:
    with serving(llm, max_waiting=0) as api:
        error = api.refused(PATH, {"input": ["a"] * (llm.engine.max_sequences + 1)})
        assert error["param"] == "input"
        assert "ask for fewer" in error["message"]


def test_fields_without_effect_are_named(api: Api) -> None:
    assert embedded(api, "a", dimensions=HIDDEN, user="me", odd=1)["ignored_fields"] == ["odd"]


def test_in_the_form_of_ollama(known: dict[str, np.ndarray], api: Api) -> None:
    expected = np.array([known["one"], known["other"]])
    found = api.post("/api/embed", {"model": "tiny:latest", "input": ["one", "other"]}).json()
    np.testing.assert_allclose(found["embeddings"], expected, atol=1e-5)
    assert (found["model"], found["prompt_eval_count"]) == ("tiny:latest", 8)
    assert found["total_duration"] > 0
    single = api.post("/api/embed", {"input": "one"}).json()
    np.testing.assert_allclose(single["embeddings"], expected[:1], atol=1e-5)
    older = api.post("/api/embeddings", {"model": "tiny", "prompt": "one"}).json()
    np.testing.assert_allclose(older["embedding"], expected[0], atol=1e-5)
    assert api.post("/api/embed", {"input": []}).json()["embeddings"] == []
    assert api.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


def test_ollama_cuts_a_long_text_unless_it_must_not(known: dict[str, np.ndarray], api: Api, llm: LLM) -> None:
    found = api.post("/api/embed", {"input": "a" * 100_000}).json()
    assert found["prompt_eval_count"] == llm.parts.memory.max_context - 1
    np.testing.assert_allclose(found["embeddings"][0], known["long"], atol=1e-5)
    refused = api.post("/api/embed", {"input": "a" * 1000, "truncate": False})
    assert refused.status_code == 400
    assert set(refused.json()) == {"error"}
    assert isinstance(refused.json()["error"], str)
    assert api.post("/api/embed", {"input": "a", "model": "other"}).status_code == 404


def test_it_is_not_recorded_for_audits(llm: LLM, tmp_path: Path) -> None:
    with serving(llm) as api:
        recorder = Recorder(str(tmp_path / "served.jsonl"), share=1)
        api.bridge.watchers.append(recorder.take)
        embedded(api, "a")
        api.complete()
    assert (tmp_path / "served.jsonl").read_text().count("\n") == 1
