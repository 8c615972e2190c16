"""/v1/responses: the chat in another form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.api import HELLO, Api

PATH = "/v1/responses"


def answer(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.post(PATH, {"max_output_tokens": 8, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_the_same_text_as_a_chat(api: Api) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = api.chat(messages=messages, temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
    content = [{"type": "input_text", "text": HELLO[0]["content"]}]
    for given in (HELLO[0]["content"], HELLO, [{"type": "message", "role": "user", "content": content}]):
        made = answer(api, input=given, instructions="be brief")
        assert made["output"][0]["content"][0]["text"] == expected


def test_what_is_said_beside_it(api: Api) -> None:
    made = answer(api, input="hi", store=True, ignore_eos=True)
    assert made["status"] == "incomplete"
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["usage"]["output_tokens"] == 8
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + 8
    assert made["speculation"]["drafter"] == "ngram"
    assert made["ignored_fields"] == ["store"]
    first = api.post("/tokenize", {"prompt": made["output"][0]["content"][0]["text"][:1]}).json()["tokens"]
    ended = answer(api, input="hi", stop=made["output"][0]["content"][0]["text"][2])
    assert first
    assert ended["status"] == "completed"


def test_a_stream_is_a_story_in_order(api: Api) -> None:
    whole = answer(api, input="hi")
    response = api.post(PATH, {"input": "hi", "max_output_tokens": 8, "temperature": 0, "stream": True})
    events = []
    for block in response.text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert events[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": ""},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "nobody", "content": "x"}]},
        {"input": 5},
        {"previous_response_id": "resp_1"},
        {"max_output_tokens": 0},
        {"max_output_tokens": 10**9},
        {"text": {"format": {}}},
        {"temperature": "hot"},
        {},
    ],
    ids=str,
)
def test_what_is_refused(api: Api, fields: dict[str, Any]) -> None:
    error = api.refused(PATH, fields if "input" in fields or not fields else {"input": "hi", **fields})
    assert error["type"] == "invalid_request_error"
