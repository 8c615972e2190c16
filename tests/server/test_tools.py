"""Tools: what a client may offer, what the model gets to see of it, and calls found in answers however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls import Said, ToolCall, ToolCallParser
from paceline.chat.tools import Tools, read_tools, spelt_out
from paceline.engine.admission import grammars_of
from paceline.errors import InvalidRequest
from paceline.types import Finish
from tests.text.vocabularies import byte_level_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMES = ("get_weather", "clock")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
ULM = ToolCall("get_weather", '{"city": "Ulm"}')


def read(text: str, *cuts: int, forced: bool = False) -> Said:
    parser = ToolCallParser(NAMES, forced=forced)
    pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    parts = [*map(parser.push, pieces), parser.flush()]
    calls = tuple(call for part in parts for call in part.calls)
    assert parser.calls == len(calls)
    return Said("".join(part.content for part in parts), calls)


# text of the answer → what is shown, and what is called
ANSWERS: dict[str, tuple[str, list[ToolCall]]] = {
    "": ("", []),
    "  \n": ("  \n", []),
    "Just text, 1 < 2 and a <b> tag.": ("Just text, 1 < 2 and a <b> tag.", []),
    "Half of it: <tool_cal": ("Half of it: <tool_cal", []),
    "<<tool_call": ("<<tool_call", []),
    HERMES: ("", [ULM]),
    f"\n\n{HERMES}": ("", [ULM]),
    f"Let me look.\n{HERMES}\n": ("Let me look.\n", [ULM]),
    f"{HERMES}\n{HERMES}": ("", [ULM, ULM]),
    f"{HERMES} And so on.": ("And so on.", [ULM]),
    f"a {HERMES} b {HERMES}c": ("a b c", [ULM, ULM]),
    HERMES.replace("</tool_call>", ""): ("", [ULM]),
    HERMES.replace("</tool_call>", "</tool_c"): ("", [ULM]),
    '<tool_call>{"name": "other", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [ToolCall("other", '{"a": 1}')]),
    '<tool_call>[{"name": "clock"}, {"name": "clock", "arguments": null}]</tool_call>': (
        "",
        [ToolCall("clock", "{}"), ToolCall("clock", "{}")],
    ),
    '<tool_call>{"name": "clock", "arguments": {"x": "</tool_call>}\\"{"}}</tool_call>': (
        "",
        [ToolCall("clock", '{"x": "</tool_call>}\\"{"}')],
    ),
    "<tool_call> is a marker": ("<tool_call> is a marker", []),
    "<tool_call>{not json}</tool_call>": ("<tool_call>{not json}</tool_call>", []),
    '<tool_call>{"nom": 1}</tool_call>x': ('<tool_call>{"nom": 1}</tool_call>x', []),
    '<tool_call>{"name": "clock", "argum': ('<tool_call>{"name": "clock", "argum', []),
    '{"name": "get_weather", "parameters": {"city": "Paris"}}': ("", [PARIS]),
    ' { "name" : "get_weather", "arguments": {"city": "Paris"}}\n': ("", [PARIS]),
    '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}': ("", [PARIS]),
    '{"name": "get_weather", "parameters": {"city": "Ulm"}}; {"name": "clock", "parameters": {}}': (
        "",
        [ULM, ToolCall("clock", "{}")],
    ),
    '[{"name": "clock", "arguments": {}}]': ("", [ToolCall("clock", "{}")]),
    '{"name": "Bob", "age": 3}': ('{"name": "Bob", "age": 3}', []),
    '{"name": "clock", "hands": 2}': ('{"name": "clock", "hands": 2}', []),
    '{"name": "clock"': ('{"name": "clock"', []),
    '{"answer": 42}': ('{"answer": 42}', []),
    '{"name": "clock", "parameters": {}} done': ("done", [ToolCall("clock", "{}")]),
    "[1, 2]": ("[1, 2]", []),
    'Look: {"name": "clock", "parameters": {}}': ('Look: {"name": "clock", "parameters": {}}', []),
}


@pytest.mark.parametrize("text", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(text: str) -> None:
    content, calls = ANSWERS[text]
    expected = Said(content, tuple(calls))
    assert read(text) == expected
    assert read(text, *range(1, len(text))) == expected
    for cut in range(1, len(text)):
        assert read(text, cut) == expected
        assert read(text, cut // 2, cut) == expected


def test_text_is_not_held_back_without_need() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push("Hello").content == "Hello"
    assert parser.push(" <b>").content == " <b>"
    assert parser.push("<tool").content == ""
    assert parser.push("s>").content == "<tools>"


def test_ids_differ() -> None:
    first, second = read(f"{HERMES}{HERMES}").calls
    assert first.id != second.id
    assert first.id.startswith("call_")


def test_a_forced_call_may_break_off() -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Ul'
    expected = Said("", (ToolCall("get_weather", '{"city": "Ul'),))
    assert read(text, forced=True) == expected
    assert read(text, *range(1, len(text)), forced=True) == expected
    assert read('{"name": "get_we', forced=True) == Said('{"name": "get_we', ())


# ── what a client may offer ──


def tools(choice: Any = None, *offered: Any) -> Tools:
    read = read_tools(list(offered) or [WEATHER, CLOCK], choice)
    assert read is not None
    return read


def test_choices() -> None:
    assert read_tools(None) is None
    assert read_tools([], "auto") is None
    assert read_tools([WEATHER], "none") is None
    assert tools().choice == "auto"
    assert not tools().forced
    assert tools().grammar is None
    assert tools("required").forced
    assert tools({"type": "function", "function": {"name": "clock"}}).choice == "clock"
    assert tools({"type": "function", "name": "clock"}).choice == "clock"


@pytest.mark.parametrize(
    ("offered", "choice", "message"),
    [
        (None, "required", "there are no tools"),
        ({}, None, "must be a list"),
        ([5], None, r"tools\[0\] must be an object"),
        ([{"type": "retrieval"}], None, "of type 'function', not 'retrieval'"),
        ([{"type": "function", "function": 1}], None, "function must be an object"),
        ([{"type": "function", "function": {}}], None, "is named None"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "1 to 64 letters"),
        ([{"type": "function", "function": {"name": "a" * 65}}], None, "1 to 64 letters"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "must be a JSON schema"),
        ([CLOCK, CLOCK], None, "two tools are named 'clock'"),
        ([CLOCK], "sometimes", "must be auto, none, required"),
        ([CLOCK], {"type": "function"}, "must be auto, none, required"),
        ([CLOCK], {"function": {"name": "watch"}}, "'watch', which is not among the tools"),
        ([{"function": {"name": f"f{i}"}} for i in range(129)], None, "at most 128"),
    ],
)
def test_what_is_refused(offered: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_tools(offered, choice)
    assert caught.value.param in ("tools", "tool_choice")


# ── forced calls ──


def fits(tools: Tools, text: str) -> bool:
    tokenizer = byte_level_tokenizer()
    compiled = grammars_of(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
    assert tools.grammar is not None
    ids = tokenizer.encode(text, add_bos=False)
    return compiled.start(tools.grammar).fits(ids) == (len(ids), Finish.STOP)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_a_demanded_call_is_one_of_the_tools() -> None:
    required = tools("required")
    assert fits(required, call("get_weather", city="Ulm", unit="C"))
    assert fits(required, call("clock"))
    assert not fits(required, call("clock", zone=1))
    assert not fits(required, call("get_weather"))
    assert not fits(required, call("watch"))
    assert not fits(required, "It is late.")


def test_a_named_call_is_that_one() -> None:
    named = tools({"type": "function", "function": {"name": "get_weather"}})
    assert fits(named, call("get_weather", city="Ulm"))
    assert not fits(named, call("clock"))


def test_schemas_that_refer_to_themselves() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
        "$defs": {"leaf": {"type": "integer"}},
        "additionalProperties": False,
    }
    both = tools("required", {"function": {"name": "grow", "parameters": tree}}, CLOCK)
    assert fits(both, call("grow", left={"left": {}, "leaf": 3}))
    assert not fits(both, call("grow", left={"leaf": "x"}))
    assert fits(both, call("clock"))


# ── what the model sees ──

KNOWING = "{% for tool in tools %}{{ tool.function.name }},{% endfor %}{{ messages[-1].content }}"


def test_a_template_that_knows_tools_gets_them() -> None:
    messages, offered = tools().place([{"role": "user", "content": "Hi"}], KNOWING)
    assert ChatTemplate(byte_level_tokenizer(), KNOWING).render(messages, tools=offered) == "get_weather,clock,Hi"


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_for_another_they_are_spelt_out(system: list[Any]) -> None:
    template = ChatTemplate(byte_level_tokenizer())
    calls = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "é"}'}}]
    messages = [
        *system,
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    placed, offered = tools().place(messages, template.source)
    assert offered is None
    text = template.render(placed)
    assert text.count("<|im_start|>system") == 1
    assert ("Be kind.\n\nYou may call" in text) == bool(system)
    assert '"name": "get_weather"' in text
    assert '{"name": <function-name>, "arguments": <arguments-json-object>}' in text
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in text


def test_calls_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="a name and arguments"):
        spelt_out([{"role": "assistant", "tool_calls": [{"function": {}}]}])
