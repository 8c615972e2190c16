"""`prediction` over HTTP: it changes no answer, its tokens are counted, and what is wrong with one is said."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from tests.server.api import HELLO, Api, serving, text_of

CHAT = "/v1/chat/completions"
LETTERS = {
    "temperature": 1,
    "seed": 3,
    "allowed_token_ids": list(range(65, 91)),
    "max_tokens": 40,
}  # read back as written
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 7, "n": 2}]


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.unwatched
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_right_or_wrong_it_changes_nothing(api: Api, sampling: dict[str, Any]) -> None:
    fields = {"max_tokens": 40, **sampling}
    plain = api.chat(**fields, speculation={"enabled": False})
    text = said(plain)
    for guess in (text, "something else altogether", text[3:9] + "no" + text[9:30]):
        answer = api.chat(**fields, prediction=predicted(guess))
        assert answer["choices"] == plain["choices"]
        assert "ignored_fields" not in answer
        chunks = api.chat_stream(**fields, prediction=predicted(guess))
        assert text_of(chunks) == text


def test_tokens_of_a_right_one_are_counted(api: Api) -> None:
    plain = api.chat(**LETTERS)
    assert counts(plain) == (0, 0)  # whatever was drafted, nothing was predicted
    answer = api.chat(**LETTERS, prediction=predicted(said(plain)))
    accepted, _ = counts(answer)
    told = answer["speculation"]
    assert 20 < accepted <= told["num_accepted_tokens"]
    assert told["drafter"] == "prediction+ngram"
    assert told["tokens_per_step"] > 3
    half = [{"type": "text", "text": part} for part in (said(plain)[:5], said(plain)[5:])]
    together, _ = counts(api.chat(**LETTERS, prediction=predicted(half)))
    assert together > 20  # not equal: steps that are drawn to run plain accept nothing


def test_a_wrong_one_is_rejected_by_the_token(api: Api) -> None:
    beginning = said(api.chat(**LETTERS))[:2]
    answer = api.chat(**LETTERS, prediction=predicted(beginning + "......"), speculation={"drafter": "prediction"})
    accepted, rejected = counts(answer)
    told = answer["speculation"]
    assert rejected > 0
    assert accepted + rejected < told["num_draft_tokens"], "drafts from prompt and output are not of the prediction"
    assert told["num_accepted_tokens"] > accepted


def test_every_endpoint_knows_it(api: Api) -> None:
    text = api.complete(**LETTERS)["choices"][0]["text"]
    answer = api.complete(prompt=["abcabcabc"] * 2, **LETTERS, prediction=predicted(text))
    assert [choice["text"] for choice in answer["choices"]] == [text] * 2
    assert counts(answer)[0] > 50
    body = {"input": "Hello", **LETTERS, "max_output_tokens": 40}
    plain = api.post("/v1/responses", body).json()
    text = plain["output"][0]["content"][0]["text"]
    answer = api.post("/v1/responses", body | {"prediction": predicted(text)}).json()
    assert answer["output"][0]["content"][0]["text"] == text
    assert answer["usage"]["output_tokens_details"]["accepted_prediction_tokens"] > 20
    assert plain["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == 0


def test_chunks_say_whose_draft_it_was(api: Api) -> None:
    text = said(api.chat(**LETTERS))
    chunks = api.chat_stream(**LETTERS, prediction=predicted(text), paceline={"events": True})
    told = [chunk["paceline"] for chunk in chunks if "paceline" in chunk]
    by = {one["drafter"] for one in told if "accepted" in one["origins"]}
    assert "prediction" in by
    assert by <= {"prediction", "ngram"}
    assert all(one["drafter"] is None for one in told if one["origins"] == ["plain"])


@pytest.mark.parametrize(
    "given",
    [
        {"content": "x"},
        {"type": "contents", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 5},
        {"type": "content", "content": None},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": ["x"]},
        "x",
        ["x"],
    ],
)
def test_a_wrong_form_is_refused(api: Api, given: Any) -> None:
    error = api.refused(CHAT, {"messages": HELLO, "prediction": given})
    assert error["param"].split(".")[0] == "prediction"


def test_longer_than_the_context_is_refused(api: Api) -> None:
    error = api.refused(CHAT, {"messages": HELLO, "prediction": predicted("z " * 5000)})
    assert error["param"] == "prediction"
    assert "the context holds" in error["message"]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"speculation": {"enabled": False}}),
        ({"allowed_drafters": ("ngram",)}, {}),
        ({}, {"prediction": predicted("")}),
    ],
)
def test_where_it_has_no_effect_it_is_named(llm: LLM, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    with serving(llm, **settings) as api:
        answer = api.chat(**{"prediction": predicted("Hello"), **fields})
        assert answer["ignored_fields"] == ["prediction"]
        assert counts(answer) == (0, 0)


def test_without_one_its_drafter_has_nothing_to_do(api: Api) -> None:
    told = api.chat(speculation={"drafter": "prediction"})["speculation"]
    assert told["num_drafts"] == 0
    assert told["off_reason"] == "the request has no prediction"
