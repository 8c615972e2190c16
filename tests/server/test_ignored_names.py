"""Fields without effect inside messages, parts, tools and schemas: each is named, and those with an effect are not."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from tests.cli.tiny_model import TEMPLATE, write_model
from tests.server.api import HELLO, Api

LAMP = {"name": "lamp", "parameters": {"type": "object", "properties": {"at": {"type": "string", "format": "clock"}}}}
FORM = {"type": "object", "properties": {"at": {"enum": ["a"]}, "to": {"type": "integer", "format": "int32"}}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template mentions names of messages, and tools."""
    template = "{{ messages[0].name }}{% if tools %}{% endif %}" + TEMPLATE
    path = write_model(tmp_path_factory.mktemp("names"), template=template)
    return LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)


def wrapped(function: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function, **fields}]


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM, **fields}}


def turn(**fields: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": "Hi", **fields}, *HELLO]


# fields of a chat → names
CHATS: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": [HELLO[0] | {"name": "Ann"}]}, []),
    ({"messages": [HELLO[0] | {"nick": "Ann", "name": "Ann"}]}, ["messages[0].nick"]),
    ({"messages": turn(refusal=None, annotations=[], audio=None, function_call=None)}, []),
    ({"messages": turn(audio={"id": "1"})}, ["messages[1].audio"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "x"}}]}]},
        ["messages[0].content[0].cache_control"],
    ),
    ({"tools": wrapped(LAMP | {"returns": 1}, extra=2)}, ["tools[0].extra", "tools[0].function.returns"]),
    ({"tools": wrapped(LAMP)}, []),
    ({"tools": wrapped(LAMP | {"strict": True})}, ["tools[0].function.parameters.properties.at.format"]),
    ({"tools": wrapped(LAMP), "tool_choice": "required"}, ["tools[0].function.parameters.properties.at.format"]),
    ({"tools": wrapped(LAMP), "tool_choice": "none"}, []),
    (
        {"response_format": schema(version=2) | {"extra": 1}},
        [
            "response_format.extra",
            "response_format.json_schema.schema.properties.to.format",
            "response_format.json_schema.version",
        ],
    ),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a", "x": 1}]}},
        ["prediction.content[0].x"],
    ),
    ({"x": None, "speculation": {"y": 1}}, ["speculation.y", "x"]),
]


@pytest.mark.parametrize(("fields", "names"), CHATS, ids=str)
def test_names_in_a_chat(api: Api, fields: dict[str, Any], names: list[str]) -> None:
    asked = {"max_tokens": 2} | fields
    assert api.chat(**asked).get("ignored_fields", []) == names
    assert api.chat_stream(**asked)[0].get("ignored_fields", []) == names


def test_names_in_responses(api: Api) -> None:
    """What an answer had and a client sends back is not named; reasoning is, for it has no effect."""
    text = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", "detail": 1}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm"}],
            "encrypted_content": "x",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [text],
            "phase": "final",
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "1",
            "name": "lamp",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "1", "output": "on", "id": None, "status": None},
    ]
    body = {
        "input": items,
        "tools": [{"type": "function", "returns": 1, **LAMP}],
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "f", "schema": FORM, "version": 2}},
        "max_output_tokens": 2,
    }
    made = api.post("/v1/responses", body).json()
    assert made["ignored_fields"] == [
        "input[0].content[0].detail",
        "input[1]",
        "input[2].phase",
        "text.format.schema.properties.to.format",
        "text.format.version",
        "text.verbosity",
        "tools[0].parameters.properties.at.format",
        "tools[0].returns",
    ]
    without = {**body, "input": [item for item in items if item.get("type") != "reasoning"]}
    assert api.post("/v1/responses", without).json()["usage"]["input_tokens"] == made["usage"]["input_tokens"]


def test_names_of_messages_to_tokenise(api: Api) -> None:
    body = {"messages": [HELLO[0] | {"nick": 1, "name": "Ann"}], "foo": 1}
    assert api.post("/tokenize", body).json()["ignored_fields"] == ["foo", "messages[0].nick"]


def test_completions_name_keywords_of_their_form(api: Api) -> None:
    answer = api.complete(response_format=schema(), max_tokens=2)
    assert answer["ignored_fields"] == ["response_format.json_schema.schema.properties.to.format"]


# ── refusals ──


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "text", "text": "I will not."}], "refusal": None},
    ],
    ids=str,
)
def test_an_assistant_may_have_refused(api: Api, said: dict[str, Any]) -> None:
    def prompt(message: dict[str, Any]) -> Any:
        return api.post("/tokenize", {"messages": [*HELLO, {"role": "assistant", **message}, *HELLO]}).json()["tokens"]

    assert prompt(said) == prompt({"content": "I will not."})


def test_nobody_else_refuses(api: Api) -> None:
    part = {"type": "refusal", "refusal": "No."}
    error = api.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert "reads text only" in error["message"]
