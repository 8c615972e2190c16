"""Anthropic's API: the same text as a chat, in its own form, with its own errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.chat.tool_calls import ToolCall
from paceline.llm import LLM
from paceline.server.answers.anthropic import MessagesAnswer
from paceline.server.answers.arguments import parsed_arguments
from paceline.server.problems import describe
from paceline.server.protocol.anthropic import AnthropicAnswer, AnthropicMessage, MessagesRequest
from paceline.server.protocol.requests import ChatRequest
from paceline.server.translate.anthropic import conversation, messages_chat
from paceline.server.translate.translator import Translation
from paceline.types import Finish, Request, TokenEvent
from tests.cli.tiny_model import TEMPLATE, write_model
from tests.server.api import HELLO, Api, serving

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SHORT = "{% if tools %}{{ tools | length }} tools{% endif %}"  # the context has 256 bytes
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 8}
LAMP = {
    "name": "lamp",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template speaks of tools."""
    path = write_model(tmp_path_factory.mktemp("tools"), template=SHORT + TEMPLATE)
    return LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)


def answer(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.post(PATH, {"messages": HELLO, "max_tokens": 8, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    AnthropicAnswer.model_validate(made)
    return made


def events(api: Api, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "stream": True} | fields
    response = api.post(PATH, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return list(read_events(response))


def read_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for block in response.text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        yield event


def chat_text(api: Api, **fields: Any) -> str:
    made: str = api.chat(temperature=0, max_tokens=8, **fields)["choices"][0]["message"]["content"]
    return made


def test_the_same_text_as_a_chat(api: Api) -> None:
    expected = chat_text(api, messages=[{"role": "system", "content": "be brief"}, *HELLO])
    blocks = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    brief = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    assert answer(api, messages=[{"role": "system", "content": "be brief"}, *HELLO])["content"][0]["text"] == expected
    for messages in (HELLO, blocks):
        for system in ("be brief", brief):
            made = answer(api, messages=messages, system=system)
            assert made["content"] == [{"type": "text", "text": expected}]
    assert made["ignored_fields"] == ["system[0].cache_control"]


def test_speculation_is_visible_and_may_be_switched_off(api: Api) -> None:
    on, off = answer(api), answer(api, speculation={"enabled": False})
    assert on["content"] == off["content"]
    assert on["speculation"]["drafter"] == "ngram"
    assert off["speculation"]["enabled"] is False
    assert "ignored_fields" not in on


def test_a_stream_tells_the_same(api: Api) -> None:
    whole, told = answer(api), events(api)
    kinds = [event["type"] for event in told if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    begun, ended = told[0]["message"], told[-2]
    assert begun["content"] == []
    assert begun["stop_reason"] is None
    assert begun["usage"]["input_tokens"] > 0
    assert ended["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert ended["speculation"]["drafter"] == "ngram"


def test_usage_counts_cached_tokens_apart(api: Api) -> None:
    messages = [{"role": "user", "content": "once more, and " * 6}]
    first = answer(api, messages=messages, max_tokens=1)["usage"]
    again = answer(api, messages=messages, max_tokens=1)["usage"]
    count = api.post(COUNT, {"messages": messages}).json()
    assert again["cache_read_input_tokens"] > 0
    for usage in (first, again):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
        assert usage["output_tokens"] == 1


def test_why_an_answer_ends(api: Api) -> None:
    cut = answer(api)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    letter = cut["content"][0]["text"][3]
    stopped = answer(api, stop_sequences=["never", letter])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", letter)
    ended = events(api, stop_sequences=[letter])[-2]["delta"]
    assert ended == {"stop_reason": "stop_sequence", "stop_sequence": letter}


def test_max_tokens_beyond_the_context_end_there(api: Api) -> None:
    """Coding agents send tens of thousands, whatever the model's context is."""
    made = answer(api, messages=[{"role": "user", "content": "x" * 200}], max_tokens=32000)
    assert made["stop_reason"] == "model_context_window_exceeded"


def test_an_answer_that_is_begun_goes_on(api: Api) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "<|im_end|>abc"}]
    plain = api.chat(return_token_ids=True, temperature=0)
    chat = api.chat(messages=begun, continue_final_message=True, return_token_ids=True, temperature=0, max_tokens=8)
    beginning = chat["prompt_token_ids"][len(plain["prompt_token_ids"]) :]
    assert beginning == api.bridge.llm.tokenizer.encode("<|im_end|>abc", add_bos=False)  # as text: no control token
    assert answer(api, messages=begun)["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert api.refused("/v1/chat/completions", {"messages": HELLO, "continue_final_message": True})


# ── tools ──


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "lamp"}], ids=str)
def test_a_call_that_is_demanded(api: Api, choice: dict[str, Any]) -> None:
    fields = {"tools": [LAMP], "tool_choice": choice, "max_tokens": 200, "temperature": 1, "seed": 3}
    whole = answer(api, **fields)
    [block] = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "lamp", "tool_use")
    assert set(block["input"]) == {"on"}
    told = [event for event in events(api, **fields) if event["type"].startswith("content_block")]
    begun, grown, _ = told
    assert (begun["content_block"]["type"], begun["content_block"]["input"]) == ("tool_use", {})
    assert grown["delta"]["type"] == "input_json_delta"
    assert json.loads(grown["delta"]["partial_json"]) == block["input"]


def test_one_call_at_most(api: Api) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    made = answer(api, tools=[LAMP], tool_choice=choice, max_tokens=100, temperature=1, seed=1)
    assert sum(block["type"] == "tool_use" for block in made["content"]) <= 1
    given = messages_chat(MessagesRequest.model_validate({**BODY, "tools": [LAMP], "tool_choice": choice})).body
    assert isinstance(given, ChatRequest)
    assert (given.tool_choice, given.parallel_tool_calls) == ("auto", False)


def test_a_call_that_is_cut_keeps_what_it_has(api: Api) -> None:
    made = answer(api, tools=[LAMP], tool_choice={"type": "any"}, max_tokens=24, temperature=1, seed=3)
    assert made["stop_reason"] == "max_tokens"
    assert all(isinstance(block.get("input", {}), dict) for block in made["content"])


def test_arguments_of_a_call_that_was_cut() -> None:
    cut = {
        '{"a": 1, "b": "x': {"a": 1},
        '{"a": [1, {"b": 2}': {"a": [1, {"b": 2}]},
        "": {},
        "{": {},
        "[1]": {},
        "x": {},
    }
    for text, parsed in cut.items():
        assert parsed_arguments(ToolCall("f", text)) == parsed


def test_results_of_tools_become_messages() -> None:
    given = [
        {"role": "user", "content": "light?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "lamp", "input": {"on": True}},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "b", "name": "door", "input": {}}]},
        {"role": "assistant", "content": "And look."},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "lit"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no door", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "user", "content": "well?"},
    ]
    read = [m.model_dump(exclude_unset=True) for m in conversation([AnthropicMessage(**each) for each in given])]
    lamp, door = read[1].pop("tool_calls")  # of two turns, which are one
    assert read == [
        {"role": "user", "content": "light?"},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": "And look."},
        {"role": "tool", "content": "lit", "tool_call_id": "a", "name": "lamp"},
        {"role": "tool", "content": "Error: no door", "tool_call_id": "b", "name": "door"},
        {"role": "user", "content": "so?\nwell?"},
    ]
    assert (lamp["id"], lamp["function"]) == ("a", {"name": "lamp", "arguments": '{"on": true}'})
    assert (door["id"], door["function"]["arguments"]) == ("b", "{}")


def test_a_conversation_with_calls_is_answered(api: Api) -> None:
    call = {"type": "tool_use", "id": "a", "name": "lamp", "input": {"on": True}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    turn = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert answer(api, messages=[*HELLO, *turn], tools=[LAMP])["usage"]["output_tokens"]
    assert answer(api, messages=[*HELLO, *turn], tools=[LAMP], tool_choice={"type": "none"})["content"]
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert "ignored_fields" not in answer(api, messages=[*HELLO, *turn], tools=[LAMP], tool_choice=single)


def test_calls_are_neither_merged_nor_continued() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "lamp", "input": {}}]}
    text = {"role": "assistant", "content": "so"}
    for given in ([*HELLO, call], [*HELLO, call, text]):
        made = messages_chat(MessagesRequest.model_validate({"messages": given, "max_tokens": 1})).body
        assert isinstance(made, ChatRequest)
        assert len(made.messages) == len(given)
        assert made.messages[1].tool_calls
        assert made.continue_final_message is (None if given[-1] is call else True)


def test_an_answer_of_a_form(api: Api) -> None:
    schema = LAMP["input_schema"]
    form = {"format": {"type": "json_schema", "schema": schema}}
    made = answer(api, output_config=form, max_tokens=100, temperature=1, seed=1)
    assert set(json.loads(made["content"][0]["text"])) == {"on"}
    assert "ignored_fields" not in made


def test_keywords_of_schemas_without_effect_have_anthropics_names(api: Api) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    form = {"format": {"type": "json_schema", "schema": odd}}
    made = answer(api, output_config=form, max_tokens=1)
    assert made["ignored_fields"] == ["output_config.format.schema.properties.a.format"]
    tool = {"name": "f", "input_schema": odd}
    made = answer(api, tools=[tool], tool_choice={"type": "any"}, max_tokens=1)
    assert made["ignored_fields"] == ["tools[0].input_schema.properties.a.format"]


# ── what has no effect, and what is refused ──


def test_fields_without_effect_are_named(api: Api) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [*HELLO, {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}, *HELLO]
    made = answer(
        api,
        messages=messages,
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "me"},
        context_management={},
        tools=[LAMP | {"cache_control": {"type": "ephemeral"}}],
        output_config={"effort": "high"},
    )
    assert made["ignored_fields"] == [
        "context_management",
        "messages[1].content[0]",
        "output_config.effort",
        "thinking",
        "tools[0].cache_control",
    ]
    assert "ignored_fields" not in answer(api, thinking={"type": "disabled"})


CALL_BLOCK = {"type": "tool_use", "id": "a", "name": "lamp", "input": {}}
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "a", "content": "on"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "needs id, name and input"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "it is one of user, assistant, system"),
        ({"system": [IMAGE]}, "system[0] is of type 'image'"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "is a text: it needs the field text"),
        ({"messages": [{"role": "user", "content": [CALL_BLOCK]}]}, "a call belongs into a message of the assistant"),
        ({"messages": [{"role": "assistant", "content": [RESULT_BLOCK]}]}, "belongs into a message of the user"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "which only Anthropic's models know"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [LAMP], "tool_choice": {"type": "tool", "name": "door"}}, "not among the tools"),
        ({"tools": [LAMP], "tool_choice": {"type": "tool"}}, "of type tool with a name"),
        ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
        ({"speculation": {"drafter": "nobody"}}, "nobody"),
        ({"messages": [{"role": "user", "content": "long " * 100}]}, "prompt is too long: "),
    ],
    ids=str,
)
def test_what_is_refused(api: Api, fields: dict[str, Any], said: str) -> None:
    response = api.post(PATH, {"messages": HELLO, "max_tokens": 8} | fields)
    error = check_error(response, 400)
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


def check_error(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    error: dict[str, str] = body["error"]
    return error


def test_errors_are_anthropics_wherever_they_arise(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",), max_body_bytes=200) as api:
        body = {"messages": HELLO, "max_tokens": 1}

        def ask(path: str = PATH, key: str = "secret", method: str = "POST", **fields: Any) -> httpx.Response:
            headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            return api.run(api.http.request(method, path, json=body | fields, headers=headers))

        assert ask().status_code == 200
        assert check_error(ask(key="wrong"), 401)["type"] == "authentication_error"
        assert check_error(ask(model="claude-x"), 404)["type"] == "not_found_error"
        assert check_error(ask(f"{PATH}/batches"), 404)["type"] == "not_found_error"
        assert check_error(ask(metadata={"user_id": "x" * 300}), 413)["type"] == "request_too_large"


def test_a_key_may_come_in_either_header(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",)) as api:

        def status(*headers: tuple[str, str]) -> int:
            return api.run(api.http.get("/v1/models", headers=list(headers))).status_code

        assert status(("x-api-key", "secret")) == 200
        assert status(("x-api-key", "none"), ("authorization", "Bearer secret")) == 200
        assert status(("x-api-key", "secret"), ("authorization", "Bearer none")) == 200
        assert status(("x-api-key", "secret"), ("x-api-key", "secret")) == 401
        assert status(("x-api-key", "Bearer secret")) == 401
        assert status(("authorization", "secret")) == 401


def test_other_names_for_the_model(llm: LLM) -> None:
    with serving(llm, served_aliases=("claude-*", "gpt-4o")) as api:
        assert answer(api, model="claude-sonnet-4-5")["model"] == "tiny"
        assert api.chat(model="gpt-4o")["model"] == "tiny"
        assert api.post(PATH, {"messages": HELLO, "max_tokens": 1, "model": "gpt-4o-mini"}).status_code == 404


def test_a_request_is_named_in_the_header_that_the_sdk_reads(api: Api) -> None:
    response = api.post(PATH, {"messages": HELLO, "max_tokens": 1})
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "request-id" not in api.get("/health").headers


def bare_answer(api: Api) -> MessagesAnswer:
    asked = Translation(id="x", requests=(Request(id="x", prompt=(1,)),))
    return MessagesAnswer(asked, api.bridge.llm.tokenizer, model="tiny")


def test_an_answer_without_a_word_is_an_empty_text(api: Api) -> None:
    made = bare_answer(api)
    made.add(TokenEvent(request_id="x", sample=0, finish=Finish.STOP))
    whole = made.whole()
    assert [block.model_dump() for block in whole.content] == [{"type": "text", "text": ""}]
    assert whole.stop_reason == "end_turn"


def test_a_stream_that_breaks_says_so(api: Api) -> None:
    made = bare_answer(api)
    [chunk] = made.fail(describe(RuntimeError("inside"))[1])
    assert chunk.startswith(b"event: error\n")
    assert json.loads(chunk.partition(b"data: ")[2])["error"]["type"] == "api_error"


def test_counting(api: Api) -> None:
    plain = api.post(COUNT, {"messages": HELLO}).json()
    assert plain.keys() == {"input_tokens"}
    more = api.post(COUNT, {"messages": HELLO, "system": "be brief", "tools": [LAMP], "max_tokens": 5}).json()
    assert more["input_tokens"] > plain["input_tokens"]
    assert more["ignored_fields"] == ["max_tokens"]
    assert api.post(COUNT, {"messages": []}).json()["error"]["type"] == "invalid_request_error"


# ── calls as a coding agent makes them ──


def test_the_calls_of_a_coding_agent(llm: LLM) -> None:
    """Ask under another name, with beta headers, system blocks, cache marks, tools and far too many tokens."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-sonnet-4-5-20250929",
        "system": [{"type": "text", "text": "You are an agent."} | cached],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | cached]}],
        "tools": [LAMP | {"description": "Switch it"} | cached],
        "metadata": {"user_id": "user_x_session_y"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "max_tokens": 32000,
        "temperature": 1,
        "stream": True,
    }
    headers = {
        "authorization": "Bearer secret",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    with serving(llm, api_keys=("secret",), served_aliases=("claude-*",)) as api:
        asked = api.run(api.http.post(f"{PATH}?beta=true", json=body, headers=headers))
        told = list(read_events(asked))
        assert told[-1]["type"] == "message_stop"
        names = told[0]["message"]["ignored_fields"]
        places = ("messages[0].content[0]", "system[0]", "tools[0]")
        assert sorted([*(f"{place}.cache_control" for place in places), "thinking"]) == names
        counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
        count = api.run(api.http.post(f"{COUNT}?beta=true", json=counted, headers=headers)).json()
        usage = told[-2]["usage"]
        assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
