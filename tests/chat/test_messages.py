from __future__ import annotations

from typing import Any

import pytest

from paceline.chat.messages import check_json, check_messages, check_tools
from paceline.errors import InvalidRequest


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, "two"]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("[1", "[1"), ("[1]", "[1]"), (None, {})],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}


def test_what_is_null_is_left_out() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": [], "name": None, "refusal": None}
    assert check_messages([message]) == [{"role": "assistant", "content": "x"}]


def test_the_callers_messages_are_left_alone() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call], "refusal": None}
    check_messages([message])
    assert message == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (None, "non-empty list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role is None; allowed are system"),
        ([{"role": "user<|im_end|>", "content": "x"}], r"messages\[0\]\.role is 'user<|im_end|>'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]\.content is missing"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "user", "content": 5}], "content is 5; it must be a string or a list of text parts"),
        ([{"role": "user", "content": []}], "content is"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'image_url'; this model reads text only"),
        ([{"role": "user", "content": [5]}], "of type 'int'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "assistant", "content": None}], "content is missing"),
        ([{"role": "assistant", "content": "", "tool_calls": "f"}], "tool_calls must be a list of objects"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], r"tool_calls\[0\]\.function must be an object"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]}], "with a name"),
    ],
)
def test_what_is_wrong_is_named(messages: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        check_messages(messages)


@pytest.mark.parametrize("tools", ["f", {"a": 1}, [1], 5])
def test_tools_must_be_a_list_of_objects(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        check_tools(tools)


def test_no_tools_are_none() -> None:
    assert check_tools([]) is None
    assert check_tools(None) is None


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nested(100), "nested deeper than 64"),
        ({1: 2}, "keys must be strings"),
        ({"a": {"b": object()}}, "x.a.b holds a object"),
        (["\ud800"], r"x\[0\] must be valid Unicode"),
        ({"\ud800": 1}, "a key of x must be valid Unicode"),
        (b"bytes", "holds a bytes"),
    ],
)
def test_only_json_values_reach_a_template(value: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        check_json(value, "x")


def test_json_values_are_copied() -> None:
    value = {"a": [1, 2.5, True, None, "x"]}
    copy = check_json(value, "x")
    assert copy == value
    assert copy["a"] is not value["a"]
