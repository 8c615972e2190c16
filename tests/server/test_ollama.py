"""Ollama's API: the same text as a chat or a completion, in its own form, and the calls of the clients that find it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest

from paceline.llm import LLM
from paceline.server.answers.ollama import GenerateLines
from paceline.server.problems import describe
from paceline.server.protocol.ollama import OllamaCall, OllamaChatAnswer, OllamaGenerateAnswer, OllamaMessage
from paceline.server.routes.ollama_models import default_parameters
from paceline.server.translate.ollama import bare_name, conversation, tagged_name
from paceline.server.translate.translator import Translation
from paceline.types import Request, SamplingParams
from tests.cli.tiny_model import SPECIAL, TEMPLATE, write_model
from tests.server.api import HELLO, Api, serving

CHAT, GENERATE = "/api/chat", "/api/generate"
SHORT = "{% if tools %}{{ tools | length }} tools{% endif %}"  # the context has 256 bytes
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": SCHEMA}}
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model whose template speaks of tools."""
    path = write_model(tmp_path_factory.mktemp("tools"), template=SHORT + TEMPLATE)
    return LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)


def lines(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = api.post(path, {"model": "tiny", "options": GREEDY} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def whole(api: Api, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = api.post(path, {"model": "tiny", "options": GREEDY, "stream": False} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    made: dict[str, Any] = response.json()
    return made


def chat_text(api: Api, **fields: Any) -> str:
    made: str = api.chat(temperature=0, max_tokens=8, **fields)["choices"][0]["message"]["content"]
    return made


# ── chats ──


def test_a_chat_says_the_same_whole_and_in_lines(api: Api) -> None:
    expected = chat_text(api)
    made, told = whole(api, CHAT, {"messages": HELLO}), lines(api, CHAT, {"messages": HELLO})
    assert made["message"] == {"role": "assistant", "content": expected}
    assert "".join(line["message"]["content"] for line in told) == expected
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    for line in [made, *told]:
        assert line["model"] == "tiny"
        assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
        assert OllamaChatAnswer.model_validate(line).model_dump(exclude_unset=True, mode="json") == line


def test_the_last_line_counts(api: Api) -> None:
    for last in (whole(api, CHAT, {"messages": HELLO}), lines(api, CHAT, {"messages": HELLO})[-1]):
        assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 8)
        assert last["prompt_eval_count"] == api.chat()["usage"]["prompt_tokens"]
        parts = last["prompt_eval_duration"] + last["eval_duration"]
        assert 0 < parts <= last["total_duration"]
        assert last["speculation"]["drafter"] == "ngram"


def test_an_answer_that_is_begun_goes_on(api: Api) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "abc"}]
    expected = chat_text(api, messages=begun, continue_final_message=True)
    assert whole(api, CHAT, {"messages": begun})["message"]["content"] == expected


def test_options_are_those_of_a_chat(api: Api) -> None:
    options = {"temperature": 1.5, "seed": 5, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "num_predict": 8}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    fields = {name: value for name, value in options.items() if name not in ("repeat_penalty", "num_predict")}
    chat = api.chat(**fields, repetition_penalty=1.2, max_tokens=8)["choices"][0]["message"]["content"]
    made = whole(api, CHAT, {"messages": HELLO, "options": options})
    assert made["message"]["content"] == chat
    assert "ignored_fields" not in made
    stopped = whole(api, CHAT, {"messages": HELLO, "options": options | {"stop": [chat[2]]}})
    assert (stopped["done_reason"], stopped["message"]["content"]) == ("stop", chat[: chat.index(chat[2])])


def test_without_a_limit_the_context_is_one(api: Api) -> None:
    long = [{"role": "user", "content": "x" * 190}]  # the context has 256 bytes
    for limit in (-1, -2, 0, 10**6):
        made = whole(api, CHAT, {"messages": long, "options": {"temperature": 0, "num_predict": limit}})
        assert (made["done_reason"], made["prompt_eval_count"] + made["eval_count"]) == ("length", 256)


def test_drafts_by_option(api: Api) -> None:
    texts = set()
    for tokens in (0, 1, 4):
        made = whole(api, CHAT, {"messages": HELLO, "options": GREEDY | {"draft_num_predict": tokens}})
        assert made["speculation"]["enabled"] is (tokens > 0)
        assert len(made["speculation"]["num_accepted_tokens_per_pos"]) <= tokens
        texts.add(made["message"]["content"])
    off = {"enabled": False}
    made = whole(api, CHAT, {"messages": HELLO, "speculation": off, "options": GREEDY | {"draft_num_predict": 4}})
    assert made["speculation"]["enabled"] is False
    assert texts == {made["message"]["content"]}


def test_forms(api: Api) -> None:
    options = {"seed": 2, "num_predict": 100, "temperature": 1}
    made = whole(api, CHAT, {"messages": HELLO, "format": SCHEMA, "options": options})
    assert set(json.loads(made["message"]["content"])) == {"on"}
    made = whole(api, GENERATE, {"prompt": "hi", "format": "json", "options": options})
    assert made["response"].lstrip().startswith("{")
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    made = whole(api, CHAT, {"messages": HELLO, "format": odd, "options": options | {"num_predict": 1}})
    assert made["ignored_fields"] == ["format.properties.a.format"]
    anything = whole(api, CHAT, {"messages": HELLO, "format": {}, "options": options | {"num_predict": 2}})
    assert anything["message"]["content"].lstrip()[:1] in {*'{["-0123456789tfn', ""}
    assert whole(api, CHAT, {"messages": HELLO, "format": ""})["message"]["content"] == chat_text(api)


def test_calls(api: Api) -> None:
    """Ollama has no tool_choice: the model's text is a call, or is not. Here a grammar makes it write one."""
    call = {
        "type": "object",
        "properties": {"name": {"const": "lamp"}, "arguments": SCHEMA},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    body = {"messages": HELLO, "options": {"seed": 2, "num_predict": 100, "temperature": 1}}
    text = whole(api, CHAT, body | {"format": call})["message"]["content"]
    arguments = json.loads(text)["arguments"]
    told = lines(api, CHAT, body | {"format": call, "tools": [LAMP]})
    called = [line["message"] for line in told if "tool_calls" in line["message"]]
    [found] = called[0]["tool_calls"]
    assert found["function"] == {"name": "lamp", "arguments": arguments, "index": 0}


def test_calls_and_results_become_messages() -> None:
    given = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "lamp", "arguments": {"on": True}}}]},
        {"role": "tool", "content": "lit", "tool_name": "lamp"},
    ]
    read = [m.model_dump(exclude_unset=True) for m in conversation([OllamaMessage.model_validate(m) for m in given])]
    call = {"id": "call_0", "type": "function", "function": {"name": "lamp", "arguments": '{"on": true}'}}
    assert read == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "lit", "name": "lamp"},
    ]
    assert OllamaCall.model_validate(given[0]["tool_calls"][0]).function.name == "lamp"  # type: ignore[index]


def test_log_probabilities(api: Api) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    expected = api.chat(temperature=0, max_tokens=8, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert whole(api, CHAT, body)["logprobs"] == expected["content"]
    told = [score for line in lines(api, CHAT, body) for score in line.get("logprobs", ())]
    assert told == expected["content"]
    raw = whole(api, GENERATE, {"prompt": "abc", "raw": True, "logprobs": True})["logprobs"]
    assert len(raw) == 8


# ── prompts ──


def test_a_prompt_is_a_chat_of_one_message(api: Api) -> None:
    expected = chat_text(api, messages=[{"role": "system", "content": "be brief"}, *HELLO])
    body = {"prompt": HELLO[0]["content"], "system": "be brief"}
    made, told = whole(api, GENERATE, body), lines(api, GENERATE, body)
    assert made["response"] == expected == "".join(line["response"] for line in told)
    for line in [made, *told]:
        assert OllamaGenerateAnswer.model_validate(line).model_dump(exclude_unset=True, mode="json") == line


def test_a_raw_prompt_is_a_completion(api: Api) -> None:
    expected = api.complete(prompt="abcabc", temperature=0, max_tokens=8)["choices"][0]["text"]
    assert whole(api, GENERATE, {"prompt": "abcabc", "raw": True})["response"] == expected
    marked = whole(api, GENERATE, {"prompt": "<|im_start|>user", "raw": True})
    assert marked["prompt_eval_count"] == 1 + len("user")  # control tokens are read: the prompt is written for them
    assert "ignored_fields" not in marked
    endless = whole(api, GENERATE, {"prompt": "a" * 220, "raw": True, "options": {"temperature": 0}})
    assert endless["eval_count"] == 256 - 220


def test_a_model_without_a_template_continues_prompts(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_model(tmp_path_factory.mktemp("base"), template=None)
    base = LLM(str(path), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False)
    with serving(base) as api:
        expected = api.complete(prompt="abcabc", temperature=0, max_tokens=8)["choices"][0]["text"]
        made = whole(api, GENERATE, {"prompt": "abcabc", "system": "be brief"})
        assert (made["response"], made["ignored_fields"]) == (expected, ["system"])
        shown = api.post("/api/show", {"model": "tiny"}).json()
        assert (shown["capabilities"], shown["template"]) == (["completion"], "{{ .Prompt }}")


def test_a_text_between_two_others(tmp_path_factory: pytest.TempPathFactory, api: Api) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    path = write_model(tmp_path_factory.mktemp("coder"), special=(*SPECIAL, *marks))
    with serving(LLM(str(path), drafter=[], format="fp32", measure_cost=False)) as coder:
        expected = coder.complete(prompt="abc", suffix="xyz", temperature=0, max_tokens=8)
        made = whole(coder, GENERATE, {"prompt": "abc", "suffix": "xyz"})
        assert made["response"] == expected["choices"][0]["text"]
        assert made["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
        shown = coder.post("/api/show", {"model": "tiny"}).json()
        assert shown["capabilities"] == ["completion", "tools", "insert"]
        assert ".Suffix" in shown["template"]
    assert "fill-in-the-middle" in check_error(api.post(GENERATE, {"prompt": "abc", "suffix": "xyz"}), 400)


@pytest.mark.parametrize(
    ("path", "said"),
    [(CHAT, {"message": {"role": "assistant", "content": ""}}), (GENERATE, {"response": ""})],
    ids=["chat", "generate"],
)
def test_nothing_asked_is_load_or_unload(api: Api, path: str, said: dict[str, Any]) -> None:
    for keep, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
        made = api.post(path, {"model": "tiny:latest", "keep_alive": keep}).json()
        made.pop("created_at")
        assert made == {"model": "tiny:latest", "done": True, "done_reason": reason} | said
    assert whole(api, CHAT, {"messages": HELLO})["eval_count"] == 8  # the model is still there
    assert api.post(path, {"model": "other"}).status_code == 404


# ── what has no effect, and what is refused ──


def test_fields_without_effect_are_named(api: Api) -> None:
    options = GREEDY | {"num_ctx": 4096, "mirostat": 1, "seed": -1}
    body = {"messages": [HELLO[0] | {"thinking": "hm"}], "options": options, "keep_alive": "5m", "think": False}
    for made in (whole(api, CHAT, body), lines(api, CHAT, body)[-1]):
        names = ["keep_alive", "messages[0].thinking", "options.mirostat", "options.num_ctx", "think"]
        assert made["ignored_fields"] == names


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0] has images"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        (CHAT, {"messages": HELLO, "think": True}, "think"),
        (CHAT, {"messages": HELLO, "format": "xml"}, "format is json or a JSON schema"),
        (CHAT, {"messages": HELLO, "format": {"type": "nothing"}}, "format: "),
        (CHAT, {"messages": HELLO, "options": {"repeat_penalty": 1000}}, "options.repeat_penalty must be"),
        (CHAT, {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"messages": HELLO, "options": {"draft_num_predict": 5000}}, "options.draft_num_predict must be"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "other"}]}, "tools[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "long " * 100}]}, "context"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images is refused"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template is refused"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "context is refused"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "a raw prompt is the whole text"),
        (GENERATE, {"prompt": 5}, "prompt"),
    ],
    ids=str,
)
def test_what_is_refused(api: Api, path: str, fields: dict[str, Any], said: str) -> None:
    error = check_error(api.post(path, {"model": "tiny"} | fields), 400)
    assert said in error


def check_error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error: str = response.json()["error"]
    return error


def test_errors_are_ollamas_wherever_they_arise(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",), max_body_bytes=200) as api:

        def ask(path: str, body: Any, key: str = "secret") -> httpx.Response:
            return api.run(api.http.post(path, json=body, headers={"authorization": f"Bearer {key}"}))

        assert "no key" in check_error(api.post(CHAT, {"messages": HELLO}), 401)
        assert "not known" in check_error(ask(CHAT, {"messages": HELLO}, key="x"), 401)
        assert "'llama3'" in check_error(ask("/api/show", {"model": "llama3"}), 404)
        assert ask("/api/v0/models/x", {}).json()["error"]["type"] == "invalid_request_error"  # LM Studio's: as OpenAI
        assert "/api/pull" in check_error(ask("/api/pull", {"model": "llama3"}), 404)
        assert "200 bytes" in check_error(ask(CHAT, {"messages": [HELLO[0]] * 9}), 413)
        assert api.get("/").status_code == 200  # needs no key


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_the_content_type_does_not_matter_unless_a_browser_sends_it(api: Api, kind: str | None) -> None:
    """litellm sends none, and `curl -d` that of a form. A web page could send both to a foreign origin unasked."""

    def ask(path: str, **headers: str) -> int:
        typed = headers if kind is None else headers | {"content-type": kind}
        body = json.dumps({"messages": HELLO, "options": GREEDY, "max_tokens": 1})
        return api.run(api.http.post(path, content=body.encode(), headers=typed)).status_code

    assert ask(CHAT) == 200
    assert ask(CHAT, origin="http://evil.example") == 415
    assert ask(CHAT, **{"sec-fetch-site": "cross-site"}) == 415
    assert ask("/v1/chat/completions") == ask("/v1/messages") == 415


def test_a_stream_that_breaks_says_so(api: Api) -> None:
    asked = Translation(id="x", requests=(Request(id="x", prompt=(1,)),))
    made = GenerateLines(asked, api.bridge.llm.tokenizer, model="tiny")
    [line] = made.fail(describe(RuntimeError("inside"))[1])
    assert json.loads(line).keys() == {"error"}


# ── what is served ──


def test_names_with_and_without_a_tag() -> None:
    assert tagged_name("smollm2") == "smollm2:latest"
    assert tagged_name("qwen:0.5b") == "qwen:0.5b"
    assert tagged_name("host:80/qwen") == "host:80/qwen:latest"
    assert bare_name("smollm2:latest") == "smollm2"
    assert bare_name("qwen:0.5b") == "qwen:0.5b"
    assert bare_name(None) is None


def test_the_model_in_ollamas_words(api: Api) -> None:
    [listed] = api.get("/api/tags").json()["models"]
    [running] = api.get("/api/ps").json()["models"]
    shown = api.post("/api/show", {"name": listed["name"]}).json()
    assert listed["name"] == listed["model"] == "tiny:latest"
    assert len(listed["digest"]) == 64
    assert listed["size"] == sum(part.bytes for part in api.bridge.llm.parts.target.parts) > 0
    details = listed["details"]
    assert (details["format"], details["family"], details["quantization_level"]) == ("safetensors", "llama", "F32")
    assert details["parameter_size"].endswith("K")
    assert running.items() >= listed.items()
    assert (running["size_vram"], running["context_length"]) == (0, 256)
    assert shown["details"] == details
    assert shown["model_info"]["llama.context_length"] == 256
    assert shown["capabilities"] == ["completion", "tools"]
    parameters = dict(line.split() for line in shown["parameters"].splitlines())
    assert parameters == {"num_ctx": "256", "temperature": "0.5", "top_k": "40"}
    assert TEMPLATE in shown["template"]


def test_defaults_have_ollamas_names() -> None:
    lines = default_parameters(SamplingParams(repetition_penalty=1.1, stop=("x",)), 512).splitlines()
    assert [line.split() for line in lines] == [["num_ctx", "512"], ["repeat_penalty", "1.1"]]


def test_the_root_says_that_it_runs_to_all_but_browsers(api: Api) -> None:
    def root(method: str, accept: str | None) -> httpx.Response:
        headers = {} if accept is None else {"accept": accept}
        return api.run(api.http.request(method, "/", headers=headers))

    for accept in (None, "*/*", "application/json"):
        assert root("GET", accept).text == "Ollama is running"
        assert root("HEAD", accept).status_code == 200
    page = root("GET", "text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"


# ── calls as clients make them ──


def test_the_calls_of_open_webui(api: Api) -> None:
    """Verify a connection, list, look, chat with its usual fields, unload."""
    assert api.get("/api/version").json()["version"].count(".") == 2
    [model] = api.get("/api/tags").json()["models"]
    assert api.get("/api/ps").json()["models"][0]["model"] == model["model"]
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    body = {"model": model["model"], "messages": messages, "options": GREEDY | {"num_ctx": 2048}, "stream": True}
    told = lines(api, CHAT, body | {"format": None, "keep_alive": None})
    assert told[-1]["done"]
    assert told[-1]["eval_duration"] > 0  # it divides by it
    assert api.post("/api/show", {"model": model["model"]}).json()["model_info"]
    made = api.post(GENERATE, {"model": model["model"], "keep_alive": 0, "prompt": ""})
    assert made.json()["done_reason"] == "unload"


def test_the_calls_of_zed(api: Api) -> None:
    """List models with all the fields it reads, look at capabilities, stream a chat with tools."""
    [model] = api.get("/api/tags").json()["models"]
    assert {"name", "modified_at", "size", "digest"} <= model.keys()
    assert {"format", "family", "parameter_size", "quantization_level"} <= model["details"].keys()
    shown = api.post("/api/show", {"model": model["name"]}).json()
    assert "tools" in shown["capabilities"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 256
    options = {"num_ctx": 256, "num_predict": 8, "stop": [], "temperature": 0.5, "top_p": None}
    body = {"model": model["name"], "messages": HELLO, "stream": True, "keep_alive": "-1", "options": options}
    told = lines(api, CHAT, body | {"think": None, "tools": [LAMP]})
    assert all(isinstance(line["message"]["content"], str) for line in told)
    assert told[-1]["prompt_eval_count"] > 0


def test_the_calls_of_continue(api: Api) -> None:
    """Read parameters and template by the old name of the field, chat, and complete a raw prompt."""
    shown = api.post("/api/show", {"name": "tiny"}).json()
    assert int(dict(line.split() for line in shown["parameters"].splitlines())["num_ctx"]) == 256
    assert ".Suffix" not in shown["template"]
    options = GREEDY | {"num_ctx": 256, "mirostat": None, "num_gpu": None, "num_thread": None, "stop": ["\n\n"]}
    body = {"model": "tiny", "messages": HELLO, "options": options, "keep_alive": 1800, "stream": True}
    assert lines(api, CHAT, body)[-1]["done"]
    prompt = {"model": "tiny", "prompt": "def f(", "raw": True, "options": options, "keep_alive": 1800}
    assert lines(api, GENERATE, prompt)[-1]["done"]
    assert api.get("/").text == "Ollama is running"
