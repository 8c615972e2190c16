"""Fill-in-the-middle over HTTP: `suffix` of completions and llama.cpp's /infill, with their prompts and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.llm import LLM
from tests.cli.tiny_model import SPECIAL, write_model
from tests.server.api import Api, serving

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
INFILL = "/infill"
SHORT = {"input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))\n", "n_predict": 20}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_model(tmp_path_factory.mktemp("coder"), special=(*SPECIAL, *QWEN))
    return LLM(str(path), drafter=[], format="fp32", measure_cost=False)


@pytest.fixture
def api(coder: LLM) -> Iterator[Api]:
    with serving(coder) as api:
        yield api


def filled(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.post(INFILL, SHORT | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def plain(api: Api, prompt: tuple[int, ...], count: int = 20) -> str:
    """The greedy text after a prompt, without drafts."""
    greedy = {"temperature": 0, "speculation": {"enabled": False}, "max_tokens": count}
    ends = [*range(3, 9)]
    text: str = api.complete(prompt=list(prompt), stop_token_ids=ends, **greedy)["choices"][0]["text"]
    return text


def test_a_suffix_makes_the_prompt_of_a_fill_in(api: Api, coder: LLM) -> None:
    expected = plain(api, coder.tokenizer.fill_in("abc", "xyz").prompt)
    answer = api.complete(prompt="abc", suffix="xyz", temperature=0, max_tokens=20)
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == 9
    ids = coder.tokenizer.encode("abc")
    assert api.complete(prompt=ids, suffix="xyz", temperature=0, max_tokens=20)["choices"] == answer["choices"]
    both = api.complete(prompt=["abc", "b"], suffix="xyz", temperature=0, max_tokens=20)["choices"]
    assert both[0]["text"] == expected
    assert api.complete(prompt="abc", suffix="", temperature=0, max_tokens=20)["usage"]["prompt_tokens"] == 3


def test_infill_writes_the_same(api: Api, coder: LLM) -> None:
    prompt = coder.tokenizer.fill_in(SHORT["input_prefix"], SHORT["input_suffix"]).prompt
    expected = plain(api, prompt)
    answer = filled(api)
    assert answer["content"] == expected
    assert answer["stop"] is True
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (len(prompt), answer["timings"]["predicted_n"])
    assert answer["stop_type"] in ("limit", "eos")
    assert answer["truncated"] is False
    assert filled(api, seed=-1)["content"] == expected, "without a temperature nothing is drawn at random"


def test_the_line_so_far_and_other_files_are_part_of_the_prompt(api: Api, coder: LLM) -> None:
    files = [("a.py", "x = 1\n"), ("file", "y = 2\n")]
    prompt = coder.tokenizer.fill_in(SHORT["input_prefix"] + "    re", SHORT["input_suffix"], files=files).prompt
    extra = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    answer = filled(api, prompt="    re", input_extra=extra)
    assert answer["content"] == plain(api, prompt)
    assert answer["tokens_evaluated"] == len(prompt)


def test_a_stream_says_the_same(api: Api) -> None:
    whole = filled(api)
    response = api.post(INFILL, SHORT | {"stream": True})
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].keys() == whole.keys()
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_the_text_behind_is_a_prediction(api: Api) -> None:
    """A fill-in whose text runs into the text behind it is drafted from there, and stays the same."""
    text = filled(api, n_predict=40)["content"]
    again = {"input_prefix": SHORT["input_prefix"], "input_suffix": text, "n_predict": 40}
    plainly = filled(api, **again, speculation={"enabled": False})
    drafted = filled(api, **again)
    assert drafted["content"] == plainly["content"]
    assert drafted["speculation"]["drafter"] == "prediction"
    assert drafted["timings"]["draft_n"] > 0
    assert plainly["timings"]["draft_n"] == 0
    own = api.complete(prompt="abc", suffix="xyz", prediction={"type": "content", "content": "no"}, temperature=0)
    assert own["speculation"]["drafter"] == "prediction"


def test_it_ends_at_the_tokens_of_fill_ins(api: Api, coder: LLM) -> None:
    pad = coder.tokenizer.fim.ends if coder.tokenizer.fim else frozenset()
    for token in (8, 7, 5):  # padding, separator, middle
        assert token in pad
        answer = api.complete(prompt="abc", suffix="xyz", logit_bias={str(token): 900}, max_tokens=9)
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", token)
        assert filled(api, logit_bias={str(token): 900})["stop_type"] == "eos"
        on = api.complete(prompt="abc", suffix="xyz", logit_bias={str(token): 900}, max_tokens=9, ignore_eos=True)
        assert on["usage"]["completion_tokens"] == 9


def test_infill_cuts_what_does_not_fit_and_says_so(api: Api) -> None:
    context = api.get("/v1/models").json()["data"][0]["max_model_len"]
    answer = filled(api, input_prefix="a" * 10_000, input_suffix="b" * 10_000, n_predict=16)
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] == context - 16
    unlimited = filled(api, input_prefix="a" * 10_000, n_predict=-1)
    assert unlimited["tokens_evaluated"] == context - context // 4
    error = api.refused("/v1/completions", {"prompt": "a" * 10_000, "suffix": "b", "max_tokens": 4})
    assert error["code"] == "context_length_exceeded"


def test_nothing_to_predict_reads_the_prompt_into_the_cache(api: Api) -> None:
    first = filled(api, n_predict=0, input_prefix="k" * 100)
    assert (first["content"], first["tokens_predicted"]) == ("", 0)
    assert filled(api, input_prefix="k" * 100)["timings"]["cache_n"] >= 96


def test_only_the_fields_that_are_asked_for(api: Api) -> None:
    fields = ["content", "timings/predicted_n", "timings/none", "truncated", "", "content/x"]
    answer = filled(api, response_fields=fields)
    assert answer.keys() == {"content", "timings/predicted_n", "truncated"}
    assert filled(api, response_fields=[""]) == {}
    assert filled(api, response_fields=[]).keys() == filled(api).keys()
    lines = api.post(INFILL, {**SHORT, "stream": True, "response_fields": ["stop", "truncated"]}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events[-1] == {"stop": True, "truncated": False}
    assert all(event["stop"] is False and "content" in event for event in events[:-1])


def test_more_than_the_context_is_until_the_context(api: Api) -> None:
    assert filled(api, n_predict=10_000)["content"] == filled(api, n_predict=-1)["content"]


def test_a_cursor_at_the_start_of_a_file(api: Api) -> None:
    assert api.complete(prompt="", suffix="xyz", max_tokens=4)["usage"]["completion_tokens"] >= 1
    assert api.refused("/v1/completions", {"prompt": "", "max_tokens": 4})["param"] == "prompt"


def test_fields_of_editors_are_taken(api: Api) -> None:
    """llama.vim and llama.vscode send these; those without effect are named."""
    sent = {"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_predict_ms": 500, "n_indent": 4}
    answer = filled(api, **sent, top_k=40, top_p=0.9, stop=["\n\n\n"], repeat_penalty=1.1)
    assert answer["ignored_fields"] == sorted(sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": "5"}, "n_predict"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"model": "other"}, None),
    ],
)
def test_bad_fields_are_named(api: Api, fields: dict[str, Any], param: str | None) -> None:
    assert api.refused(INFILL, SHORT | fields)["param"] in (param, "model")


def test_an_echo_has_no_place_in_a_fill_in(api: Api) -> None:
    assert api.refused("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True})["param"] == "echo"


def test_a_model_without_such_tokens_says_so(llm: LLM) -> None:
    with serving(llm) as api:
        for path, body in (("/v1/completions", {"prompt": "a", "suffix": "b"}), (INFILL, SHORT)):
            error = api.refused(path, body)
            assert error["param"] == "suffix"
            assert "no tokens for fill-in-the-middle" in error["message"]
