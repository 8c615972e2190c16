"""Tools beside a form, or under `strict`: grammars that allow calls or something else, and how both are told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline.chat.tool_calls import CLOSE, OPEN, Said, ToolCall
from paceline.chat.tools import Tools, read_tools
from paceline.engine.admission import grammars_of
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.sampling.grammar import Grammars
from paceline.types import Finish, Grammar
from tests.cli.tiny_model import TEMPLATE, write_model
from tests.server.api import HELLO, Api
from tests.text.vocabularies import byte_level_tokenizer

SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LAMP: dict[str, Any] = {"type": "function", "function": {"name": "lamp", "parameters": SWITCH}}
DOOR: dict[str, Any] = {"type": "function", "function": {"name": "door"}}
STRICT: dict[str, Any] = {"type": "function", "function": LAMP["function"] | {"strict": True}}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["lamp", "Bob"]}, "age": {"enum": [3, 4]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOKENIZER = byte_level_tokenizer()
MARKED, BARE = "{{ tools }} <tool_call>", "{{ tools }}"  # templates of models that write calls in either way
ON = ToolCall("lamp", '{"on": true}')
CALL = '{"name": "lamp", "arguments": {"on": true}}'
TAGGED = f"{OPEN}\n{CALL}\n{CLOSE}"
BOB = '{"name": "Bob", "age": 3}'
TRAP = '{"name": "lamp", "age": 4}'  # a form that begins as a call does
FORM = Grammar.json_schema(PERSON)


@cache
def compiled() -> Grammars:
    return grammars_of(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)


def offered(template: str, form: Grammar | None, *tools: Any, choice: Any = None, parallel: bool = True) -> Tools:
    made = read_tools(list(tools) or [LAMP, DOOR], choice, parallel=parallel)
    assert made is not None
    return made.written_by(template, form)


def fits(tools: Tools, text: str) -> bool:
    """True if the grammar takes the text as a whole answer."""
    assert tools.grammar is not None
    ids = TOKENIZER.encode(text, add_bos=False)
    state = compiled().start(tools.grammar)
    taken, finish = state.fits(ids)
    after = state.allowed(ids) if taken == len(ids) else None
    return after is not None and finish is not Finish.ERROR and bool(after[list(TOKENIZER.eos_ids)].any())


def read(tools: Tools, text: str, *cuts: int) -> Said:
    parser = tools.parser()
    parts = [*(parser.push(text[a:b]) for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)), parser.flush()]
    return Said("".join(part.content for part in parts), tuple(call for part in parts for call in part.calls))


# tools, and for each text that fits what is read in it
ANSWERS: dict[str, tuple[Tools, dict[str, Said]]] = {
    "marked or form": (
        offered(MARKED, FORM),
        {TAGGED: Said("", (ON,)), f"{TAGGED}\n{TAGGED}": Said("", (ON, ON)), BOB: Said(BOB), TRAP: Said(TRAP)},
    ),
    "bare or form": (
        offered(BARE, FORM),
        {
            CALL: Said("", (ON,)),
            CALL.replace("arguments", "parameters"): Said("", (ON,)),
            f"[{CALL}, {CALL}]": Said("", (ON, ON)),
            BOB: Said(BOB),
            TRAP: Said(TRAP),
        },
    ),
    "marked, any object": (
        offered(MARKED, Grammar.json_object()),
        {TAGGED: Said("", (ON,)), f'{{"a": "{OPEN}"}}': Said(f'{{"a": "{OPEN}"}}'), CALL: Said(CALL)},
    ),
    "marked or regex": (
        offered(MARKED, Grammar.regex("(yes|no)!?")),
        {TAGGED: Said("", (ON,)), "yes": Said("yes"), "no!": Said("no!")},
    ),
    "bare or choice": (
        offered(BARE, Grammar.choice(["yes", "no/a"])),
        {CALL: Said("", (ON,)), f"{CALL}; {CALL}": Said("", (ON, ON)), "no/a": Said("no/a")},
    ),
    "one marked or form": (
        offered(MARKED, FORM, parallel=False),
        {TAGGED: Said("", (ON,)), BOB: Said(BOB)},
    ),
    "one bare or form": (
        offered(BARE, FORM, parallel=False),
        {CALL: Said("", (ON,)), BOB: Said(BOB)},
    ),
    "strict marked": (
        offered(MARKED, None, STRICT),
        {
            TAGGED: Said("", (ON,)),
            f"Let me see.\n{TAGGED}\n{TAGGED} Done": Said("Let me see.\nDone", (ON, ON)),
            "Only text <tool": Said("Only text <tool"),
            CALL: Said(CALL),  # not constrained here, so not read as a call
            "": Said(""),
        },
    ),
    "strict bare": (
        offered(BARE, None, STRICT),
        {CALL: Said("", (ON,)), f"{CALL}\n{CALL}": Said("", (ON, ON)), f"Say {TAGGED}": Said(f"Say {TAGGED}")},
    ),
    "not parallel": (
        offered(MARKED, None, parallel=False),
        {TAGGED: Said("", (ON,)), f"So: {TAGGED}": Said("So: ", (ON,)), "So": Said("So")},
    ),
    "allowed tools": (
        offered(
            MARKED,
            None,
            choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "lamp"}}]},
            },
        ),
        {TAGGED: Said("", (ON,)), "text": Said("text")},
    ),
    "forced": (offered(MARKED, FORM, choice="required"), {CALL: Said("", (ON,))}),
}
WRONG: dict[str, list[str]] = {
    "marked or form": [
        "Hello",
        CALL,
        BOB.replace("3", "5"),
        TAGGED.replace("true", "1"),
        TAGGED.replace("lamp", "pump"),
    ],
    "bare or form": ["Hello", TAGGED, CALL.replace("true", "1"), CALL.replace("lamp", "pump"), "[]"],
    "marked or regex": ["maybe", CALL],
    "one marked or form": [f"{TAGGED}\n{TAGGED}"],
    "one bare or form": [f"[{CALL}]"],
    "strict marked": [TAGGED.replace("true", '"yes"'), f"{OPEN} is a marker"],
    "strict bare": [CALL.replace("true", '"yes"'), '{"a": 1}'],
    "not parallel": [f"{TAGGED}\n{TAGGED}", f"{TAGGED} Done"],
    "allowed tools": [TAGGED.replace('"lamp", "arguments": {"on": true}', '"door", "arguments": {}')],
    "forced": [BOB, TAGGED, f"{CALL}; {CALL}"],
}


@pytest.mark.parametrize("case", ANSWERS)
def test_texts_that_fit_are_read_however_they_are_cut(case: str) -> None:
    tools, answers = ANSWERS[case]
    for text, said in answers.items():
        assert fits(tools, text), text
        assert read(tools, text) == said
        assert read(tools, text, *range(1, len(text))) == said
        for cut in range(1, len(text)):
            assert read(tools, text, cut) == said


@pytest.mark.parametrize(("case", "text"), [(case, text) for case, texts in WRONG.items() for text in texts])
def test_texts_that_do_not_fit(case: str, text: str) -> None:
    assert not fits(ANSWERS[case][0], text)


def test_no_grammar_without_need() -> None:
    assert offered(MARKED, None).grammar is None
    assert not offered(MARKED, None).constrained


@pytest.mark.parametrize("template", [MARKED, BARE])
def test_a_form_is_not_held_back_and_a_call_may_break_off(template: str) -> None:
    tools = offered(template, FORM)
    parser = tools.parser()
    assert parser.push('{"name": "Bob"').content == '{"name": "Bob"'
    assert parser.push(', "a').content == ', "a'
    cut = (TAGGED if template == MARKED else CALL).partition("tru")[0]
    assert read(tools, cut) == Said("", (ToolCall("lamp", '{"on": '),))


@pytest.mark.parametrize("case", ANSWERS)
def test_whatever_a_grammar_allows_is_calls_or_the_form(case: str) -> None:
    """Random walks: each text that ends is nothing but calls with fitting arguments, or of the form, or free text."""
    tools, _ = ANSWERS[case]
    assert tools.grammar is not None
    ended = 0
    for text, finish in walks(tools.grammar, 12):
        said = read(tools, text)
        if finish is None:
            continue
        ended += 1
        for call in said.calls:
            assert call.name in tools.callable
            assert case in ("forced",) or call.name != "lamp" or type(json.loads(call.arguments)["on"]) is bool
        if tools.form == FORM and not said.calls:
            assert json.loads(said.content)["age"] in (3, 4)
            assert not tools.forced
        assert tools.form is None or not (said.calls and said.content)
        assert tools.parallel or len(said.calls) <= 1
    assert ended > 3


def walks(grammar: Grammar, count: int) -> Iterator[tuple[str, Finish | None]]:
    """Random answers: fond of the markers' and JSON's own characters, without white space."""
    rng = np.random.default_rng(7)
    fond = np.zeros(TOKENIZER.vocab_size)
    fond[[TOKENIZER.encode(character, add_bos=False)[0] for character in '<{}[]":,/_abcdeglnorsu']] = 20
    fond[TOKENIZER.encode(" \n", add_bos=False)] = -30
    for _ in range(count):
        state, said, finish = compiled().start(grammar), [], None
        while finish is None and len(said) < 150:
            allowed = state.allowed(())
            assert allowed is not None
            mask = allowed.numpy()[: TOKENIZER.vocab_size]
            ends = [token for token in TOKENIZER.eos_ids if mask[token]]
            if ends and rng.random() < 0.2:
                finish = Finish.STOP
                break
            scores = np.where(mask, fond + rng.gumbel(size=len(mask)) * 5, -np.inf)
            scores[list(TOKENIZER.eos_ids)] = -np.inf
            said.append(int(scores.argmax()))
            finish = state.fits(said[-1:])[1]
            state.advance(said[-1:])
        assert finish is not Finish.ERROR
        yield TOKENIZER.decode(said), finish


# ── schemas of tools ──


def test_schemas_of_tools_keep_their_references() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "x": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"const": 1}},
    }
    own = {"$id": "https://example.org/own.json", "$defs": {"x": {"const": 2}}, "type": "object"}
    own |= {"properties": {"x": {"$ref": "#/$defs/x"}, "y": {"$ref": "https://example.org/own.json#/$defs/x"}}}
    literal = {"type": "object", "properties": {"x": {"const": {"$ref": "#/nowhere"}, "default": {"$ref": "#"}}}}
    schemas = [schema | {"additionalProperties": False} for schema in (tree, own, literal)]
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]
    for template, form in ((MARKED, FORM), (BARE, FORM), (BARE, None)):
        choice = None if form is not None else "required"
        made = offered(template, form, *tools, choice=choice)
        for name, arguments in (
            ("f0", {"next": {"x": 1}}),
            ("f1", {"x": 2, "y": 2}),
            ("f2", {"x": {"$ref": "#/nowhere"}}),
        ):
            call = json.dumps({"name": name, "arguments": arguments})
            assert fits(made, f"{OPEN}{call}{CLOSE}" if template == MARKED else call)
            assert not fits(made, call.replace("1", "3").replace("2", "3").replace("nowhere", "n"))
    with pytest.raises(InvalidRequest, match="two schemas have the"):
        _ = offered(BARE, FORM, tools[1], {"function": tools[1]["function"] | {"name": "g"}}).grammar


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": 5},
        {"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "lamp"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "pump"}]},
    ],
    ids=str,
)
def test_allowed_tools_that_are_refused(choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools([LAMP, DOOR], choice)
    assert caught.value.param == "tool_choice"


def test_allowed_tools_in_both_forms() -> None:
    listed = [{"type": "function", "name": "door"}]
    flat = read_tools([LAMP, DOOR], {"type": "allowed_tools", "mode": "required", "tools": listed})
    assert flat is not None
    assert (flat.choice, flat.callable, [*flat.functions]) == ("required", ("door",), ["lamp", "door"])
    assert not fits(flat, CALL)


def test_strict_functions_have_no_arguments_that_they_do_not_list() -> None:
    open_schema = {"type": "object", "properties": {"on": {"type": "boolean"}}}
    for strict in (True, False):
        function = {"name": "lamp", "parameters": open_schema, "strict": strict}
        made = offered(BARE, None, {"type": "function", "function": function}, choice="required")
        assert fits(made, CALL)
        assert fits(made, CALL.replace("true", 'true, "more": 1')) is not strict


def test_the_model_sees_nothing_of_strict() -> None:
    for template in (MARKED, "no such word"):
        strict, loose = offered(template, None, STRICT), offered(template, None, LAMP)
        assert strict.place(HELLO, template) == loose.place(HELLO, template)


def test_strict_is_a_flag() -> None:
    with pytest.raises(InvalidRequest, match="strict of tools"):
        read_tools([{"function": LAMP["function"] | {"strict": "yes"}}])


# ── over HTTP ──


@pytest.fixture(scope="module", params=["marked", "bare"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template has calls between markers, or bare."""
    hint = "{# <tool_call> #}" if request.param == "marked" else ""
    path = write_model(tmp_path_factory.mktemp("either"), template=hint + "{% if tools %}{% endif %}" + TEMPLATE)
    return LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)


def biased(llm: LLM, fond: str) -> dict[str, float]:
    biases = {str(token): -100.0 for token in llm.tokenizer.encode(" \t\r\n")}
    return biases | {str(llm.tokenizer.encode(fond)[-1]): 50.0}


def test_an_answer_is_a_call_or_the_form(api: Api, llm: LLM) -> None:
    """Whole and as a stream, of a chat and of responses, with and without speculation."""
    schema = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    kinds = set()
    for fond in ("<", "B", "u"):
        fields = {
            "tools": [LAMP],
            "response_format": schema,
            "logit_bias": biased(llm, fond),
            "temperature": 1,
            "max_tokens": 110,
            "parallel_tool_calls": False,
        }
        answer = api.chat(**fields)
        assert "ignored_fields" not in answer
        [choice] = answer["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(message["content"])["age"] in (3, 4)
        elif choice["finish_reason"] == "tool_calls":
            assert message["content"] is None
            assert type(json.loads(calls[0]["arguments"])["on"]) is bool
        for speculation in ({}, {"enabled": False}):
            deltas = [
                part["delta"] for c in api.chat_stream(**fields, speculation=speculation) for part in c["choices"]
            ]
            assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
            assert [call["function"] for delta in deltas for call in delta.get("tool_calls", [])] == calls
        form = {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}
        body = fields | {"input": HELLO, "text": form, "seed": 1, "max_output_tokens": 110}
        made = api.post("/v1/responses", {k: v for k, v in body.items() if k not in ("response_format", "max_tokens")})
        items = made.json()["output"]
        assert made.json()["parallel_tool_calls"] is False
        assert [item.get("arguments") for item in items] == [call["arguments"] for call in calls] or [None]
        assert not message["content"] or items[0]["content"][0]["text"] == message["content"]
    assert {"stop", "tool_calls"} <= kinds


def test_a_forced_call_beside_a_form_is_the_call(api: Api, llm: LLM) -> None:
    fields = {"tools": [LAMP], "logit_bias": biased(llm, "u"), "max_tokens": 80, "tool_choice": "required"}
    asked = api.chat(**fields, response_format={"type": "json_object"})["choices"][0]
    assert asked["finish_reason"] == "tool_calls"
    none = fields | {"tool_choice": "none", "response_format": {"type": "regex", "pattern": "(yes|no)"}}
    assert api.chat(**none)["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_fault_is_that_of_its_field(api: Api) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}
    body = {"messages": HELLO, "tools": [LAMP], "response_format": bad}
    assert api.refused("/v1/chat/completions", body)["param"] == "response_format"
    wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "objekt"}}}
    assert api.refused("/v1/chat/completions", {"messages": HELLO, "tools": [wrong]})["param"] == "tools"
