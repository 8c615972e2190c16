"""Answers of a form: calls of tools, JSON, and what a regular expression matches."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.chat.tool_calls import Said, ToolCallParser
from paceline.llm import LLM
from tests.cli.tiny_model import TEMPLATE, write_model
from tests.server.api import HELLO, Api, text_of

OFF = {"enabled": False}
SHORT = "{% if tools %}{{ tools | length }} tools{% endif %}"  # the context has 256 bytes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template speaks of tools."""
    path = write_model(tmp_path_factory.mktemp("tools"), template=SHORT + TEMPLATE)
    return LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)


@pytest.fixture
def dense(llm: LLM) -> dict[str, float]:
    """A bias against white space, of which a random model is fond."""
    return {str(token): -100.0 for token in llm.tokenizer.encode(" \t\r\n")}


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"on": switch}}}}
    for name, switch in (("lamp", {"type": "boolean"}), ("door", {"enum": ["open", "shut"]}))
]
for tool in TOOLS:
    parameters: Any = tool["function"]
    parameters["parameters"] |= {"required": ["on"], "additionalProperties": False}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "door"}}], ids=str)
def test_a_call_that_is_demanded(api: Api, dense: dict[str, float], choice: Any) -> None:
    fields = {
        "logit_bias": dense,
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 90,
        "n": 2,
    }
    answer = api.chat(**fields)
    for one in answer["choices"]:
        assert one["finish_reason"] == "tool_calls"
        assert one["message"]["content"] is None
        [call] = one["message"]["tool_calls"]
        assert call.keys() == {"id", "type", "function"}
        assert call["function"]["name"] in (("lamp", "door") if choice == "required" else ("door",))
        assert json.loads(call["function"]["arguments"])["on"] in (True, False, "open", "shut")
    for speculation in ({}, OFF):
        deltas = [part for chunk in api.chat_stream(**fields, speculation=speculation) for part in chunk["choices"]]
        calls = [call for part in deltas if part["index"] == 1 for call in part["delta"].get("tool_calls", [])]
        assert [(call["index"], call["function"]) for call in calls] == [
            (0, answer["choices"][1]["message"]["tool_calls"][0]["function"])
        ]
        assert text_of([{"choices": [part for part in deltas if part["delta"].get("content")]}], 1) == ""
    assert answer["usage"]["prompt_tokens"] > api.chat()["usage"]["prompt_tokens"]  # the template has the tools


def test_a_call_that_breaks_off(api: Api) -> None:
    choice = api.chat(tools=TOOLS, tool_choice="required", max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_tools_need_not_be_called(api: Api) -> None:
    plain = api.chat(temperature=0)["choices"]
    assert api.chat(temperature=0, tools=TOOLS, tool_choice="none")["choices"] == plain
    fields = {"temperature": 0, "tools": TOOLS}
    choice = api.chat(**fields)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert text_of(api.chat_stream(**fields)) == choice["message"]["content"]


def test_calls_and_their_results_reach_the_model(api: Api, llm: LLM) -> None:
    """Also by a template that knows nothing of calls."""
    call = {"id": "1", "type": "function", "function": {"name": "lamp", "arguments": '{"on": true}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "it shines"},
    ]
    tokens = api.chat(messages=messages, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    text = llm.tokenizer.decode(tokens)
    assert '"lamp"' in text
    assert "it shines" in text


def test_calls_in_the_form_of_responses(api: Api, dense: dict[str, float]) -> None:
    """Whole and as a stream, the call that a chat makes: an item of its own, told from its beginning to its end."""
    fields: dict[str, Any] = {"logit_bias": dense, "temperature": 1, "seed": 3, "tools": TOOLS}
    expected = api.chat(**fields, tool_choice="required", max_tokens=90)["choices"][0]["message"]["tool_calls"][0]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = fields | {"input": HELLO, "tools": flat, "tool_choice": "required", "max_output_tokens": 90}
    made = api.post("/v1/responses", body).json()
    [item] = made["output"]
    assert {"name": item["name"], "arguments": item["arguments"]} == expected["function"]
    assert (item["type"], item["status"], made["status"]) == ("function_call", "completed", "completed")
    assert made["tools"] == flat
    events = stream_of(api, body)
    assert [event["type"] for event in events][2:-1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert events[3]["delta"] == events[4]["arguments"] == item["arguments"]
    [told] = events[-1]["response"]["output"]
    assert events[5]["item"] == told
    for changing in ("id", "call_id"):
        assert told.pop(changing).startswith("fc-" if changing == "id" else "call_")
        item.pop(changing)
    assert told == item


def test_text_before_a_call_is_a_message_of_its_own(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """And text after it another one; the model's words are put into its mouth."""
    said = ["Let me ", "see.<tool_", 'call>{"name": "lamp", "arguments": {"on": true}}</tool_call>', "", " Done."]
    parser = ToolCallParser(["lamp"])
    read = ToolCallParser.read

    def speak(self: ToolCallParser, text: str, *, ends: bool) -> Said:
        return read(parser, "".join(said) if ends and len(said) == 5 else said.pop(0) if said else "", ends=ends)

    monkeypatch.setattr(ToolCallParser, "read", speak)
    body = {"input": "hi", "tools": TOOLS, "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    events = stream_of(api, body | {"speculation": OFF})
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in output if "content" in item] == ["Let me see.", "Done."]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [0, 1, 2]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


def test_calls_and_results_as_items_are_those_of_a_chat(api: Api) -> None:
    """The same prompt, by its length: calls of one turn are one message."""
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("lamp", "door")
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "lamp", "content": "it shines"},
    ]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        *({"type": "function_call", "call_id": c["id"], "name": c["id"], "arguments": "{}"} for c in calls),
        {"type": "function_call_output", "call_id": "lamp", "output": "it shines"},
    ]
    expected = api.chat(messages=messages, max_tokens=6, temperature=0)
    made = api.post("/v1/responses", {"input": items, "max_output_tokens": 6, "temperature": 0}).json()
    assert made["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert made["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "1"},
        {"type": "function_call", "name": "lamp"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "function_call_output", "output": "x"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    ids=str,
)
def test_items_that_are_refused(api: Api, item: dict[str, Any]) -> None:
    assert api.refused("/v1/responses", {"input": [*HELLO, item]})["param"] == "input"


def stream_of(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream of /v1/responses."""
    response = api.post("/v1/responses", body | {"stream": True})
    return [json.loads(block.partition("data: ")[2]) for block in response.text.split("\n\n")[:-1]]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "pattern": "(yes|no), [0-9]{3}"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [[True, 12], {"a": None}]}}},
        {"type": "json_object"},
    ],
    ids=lambda form: str(form["type"]),
)
def test_forms(api: Api, dense: dict[str, float], form: dict[str, Any]) -> None:
    fields = {"logit_bias": dense, "response_format": form, "max_tokens": 60, "temperature": 1, "seed": 11}
    choice = api.chat(**fields)["choices"][0]
    text = choice["message"]["content"]
    assert api.chat(**fields, speculation=OFF)["choices"] == [choice]
    assert text_of(api.chat_stream(**fields)) == text
    if form["type"] == "regex":
        assert re.fullmatch(form["pattern"], text)
    elif form["type"] == "json_schema":
        assert json.loads(text) in form["json_schema"]["schema"]["enum"]
    else:
        assert text.startswith("{")


SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "yaml"},
        {},
        {"type": 5},
        SCHEMA,
        SCHEMA | {"json_schema": {"name": "x"}},
        SCHEMA | {"json_schema": {"schema": {"type": "strnig"}}},
        SCHEMA | {"json_schema": {"schema": {"$ref": "#/nowhere"}}},
        {"type": "regex"},
        {"type": "regex", "pattern": "("},
        {"type": "regex", "pattern": "(?<=a)b"},
    ],
    ids=str,
)
def test_forms_that_are_refused(api: Api, form: Any) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "response_format": form}),
        ("/v1/completions", {"prompt": "a", "response_format": form}),
        ("/v1/responses", {"input": "a", "text": {"format": form}}),
    ):
        error = api.refused(path, body)
        assert error["param"].split(".")[0] in ("response_format", "text")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": "lamp"},
        {"tools": [5]},
        {"tools": [{"type": "magic"}]},
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        {"tools": [*TOOLS, *TOOLS]},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "tool_choice": {"function": {"name": "window"}}},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "yaml"}},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_tools_that_are_refused(api: Api, fields: dict[str, Any]) -> None:
    error = api.refused("/v1/chat/completions", {"messages": HELLO, **fields})
    assert error["param"].split(".")[0] in ("tools", "tool_choice", "response_format")
