"""/v1/completions: prompts as text and token ids, one and many, and the old format of log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from tests.server.api import Api, text_of

OFF = {"enabled": False}
GREEDY = {"temperature": 0}


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_text_and_its_token_ids_are_the_same_prompt(api: Api, llm: LLM) -> None:
    answer = api.complete(prompt="abcabc", **GREEDY)
    assert texts(api.complete(prompt=llm.tokenizer.encode("abcabc"), **GREEDY)) == texts(answer)
    assert answer["usage"]["prompt_tokens"] == 6


def test_a_batch_is_its_prompts_one_by_one(api: Api, llm: LLM) -> None:
    prompts = ["abc", "xyzxyz", "hello"]
    alone = [texts(api.complete(prompt=prompt, n=2, seed=4))[i] for prompt in prompts for i in range(2)]
    assert texts(api.complete(prompt=prompts, n=2, seed=4)) == alone
    answer = api.complete(prompt=[llm.tokenizer.encode(prompt) for prompt in prompts], n=2, seed=4)
    assert texts(answer) == alone
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 6 * 12
    chunks = api.complete_stream(prompt=prompts, n=2, seed=4)
    assert [text_of(chunks, i) for i in range(6)] == alone
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 6


@pytest.mark.parametrize("speculation", [{}, OFF], ids=["speculative", "plain"])
def test_a_prompt_is_scored_alone(api: Api, llm: LLM, speculation: dict[str, Any]) -> None:
    """With echo, max_tokens may be 0: the scores are those that come with an answer, and nothing is written."""
    prompts = [llm.tokenizer.encode(text) for text in ("the cat sat", "a", "abcabcabcabcabc")]
    fields: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1, "speculation": speculation}
    alone, more = api.complete(**fields, max_tokens=0), api.complete(**fields, max_tokens=1)
    assert alone["usage"]["completion_tokens"] == 0
    for prompt, one, other in zip(prompts, alone["choices"], more["choices"], strict=True):
        assert (one["text"], one["finish_reason"]) == (llm.tokenizer.decode(prompt), "length")
        assert one["logprobs"] == {name: column[:-1] for name, column in other["logprobs"].items()}
    chunks = api.complete_stream(**fields, max_tokens=0)
    assert [text_of(chunks, i) for i in range(3)] == texts(alone)
    assert api.complete(echo=True, max_tokens=0, n=2, prompt="ab")["choices"][1]["text"] == "ab"
    form = {"type": "json_object"}
    assert texts(api.complete(echo=True, max_tokens=0, prompt="ab", response_format=form)) == ["ab"]


def test_control_tokens_are_text_unless_they_are_asked_for(api: Api, llm: LLM) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    asked = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
    plain, parsed = llm.tokenizer.encode(text), llm.tokenizer.encode(text, special=True)
    assert len(parsed) < len(plain) == len(text)
    assert api.complete(**asked)["choices"][0]["prompt_token_ids"] == plain
    assert api.complete(**asked, parse_special=True)["choices"][0]["prompt_token_ids"] == parsed
    assert api.post("/tokenize", {"prompt": text}).json()["tokens"] == plain
    assert api.post("/tokenize", {"prompt": text, "parse_special": True}).json()["tokens"] == parsed


def test_control_tokens_in_messages_stay_text(api: Api) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    asked = api.chat(messages=messages, parse_special=True, return_token_ids=True)
    assert asked["ignored_fields"] == ["parse_special"]
    assert asked["prompt_token_ids"] == api.chat(messages=messages, return_token_ids=True)["prompt_token_ids"]
    error = api.refused("/tokenize", {"messages": messages, "parse_special": True})
    assert error["param"] == "parse_special"


def test_nothing_is_not_written(api: Api) -> None:
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}):
        assert api.refused("/v1/completions", {"prompt": "a"} | fields)["param"] == "max_tokens"
    assert api.refused("/v1/responses", {"input": "a", "max_output_tokens": 0})["param"] == "max_output_tokens"


def test_a_completion_has_16_tokens_where_nobody_says(api: Api) -> None:
    assert api.complete(max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_echo(api: Api) -> None:
    without = texts(api.complete(**GREEDY))[0]
    assert texts(api.complete(echo=True, **GREEDY)) == ["abcabcabc" + without]
    assert text_of(api.complete_stream(echo=True, **GREEDY)) == "abcabcabc" + without
    assert texts(api.complete(prompt=[80, 81], echo=True, **GREEDY))[0].startswith("no")


@pytest.mark.parametrize("speculation", [{}, OFF], ids=["speculative", "plain"])
def test_likelihoods_of_prompts(api: Api, llm: LLM, speculation: dict[str, Any]) -> None:
    """As an evaluation asks: batches of token ids, echoed with their log-probabilities."""
    prompts = [llm.tokenizer.encode(text) for text in ("the cat sat", "abab", "é")]
    fields: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, **GREEDY}
    answer = api.complete(**fields, speculation=speculation)
    assert api.complete(**fields, speculation=OFF)["choices"] == answer["choices"]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(prompt) + 1}
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert all(score < 0 for score in scores["token_logprobs"][1:])
        for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
            assert token in top
            assert 1 <= len(top) <= 2
        assert max(scores["top_logprobs"][-1], key=scores["top_logprobs"][-1].get) == scores["tokens"][-1]
    first = answer["choices"][0]["logprobs"]
    assert first["tokens"][:11] == list("the cat sat")
    assert first["text_offset"] == list(range(12))
    assert answer["choices"][2]["logprobs"]["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_logprobs_of_the_answer(api: Api) -> None:
    fields = {"logprobs": 2, "return_token_ids": True, "temperature": 0, "allowed_token_ids": [70, 71, 72]}
    fields |= {"speculation": OFF}  # sums in torch depend on the number of rows, and that on what is drafted
    choice = api.complete(**fields)["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    assert scores["text_offset"] == list(range(12))
    assert all(2 <= len(top) <= 3 for top in scores["top_logprobs"])
    assert len(choice["token_ids"]) == 12
    parts = [part for chunk in api.complete_stream(**fields) for part in chunk["choices"]]
    for name, column in scores.items():
        streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        assert streamed == column
    assert api.complete(logprobs=0)["choices"][0]["logprobs"]["tokens"]
    assert api.complete()["choices"][0]["logprobs"] is None


def test_token_ids_and_prompt_logprobs(api: Api, llm: LLM) -> None:
    fields = {"return_token_ids": True, "prompt_logprobs": 0, "temperature": 0}
    choice = api.complete(**fields)["choices"][0]
    assert choice["prompt_token_ids"] == llm.tokenizer.encode("abcabcabc")
    assert len(choice["prompt_logprobs"]) == 9
    parts = [part for chunk in api.complete_stream(**fields) for part in chunk["choices"]]
    assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]


def test_usage_and_remarks_of_a_stream(api: Api) -> None:
    *chunks, last = api.complete_stream(stream_options={"include_usage": True}, whatever=1, ignore_eos=True)
    assert chunks[0]["ignored_fields"] == ["whatever"]
    assert last["usage"]["completion_tokens"] == 12
    assert "speculation" in chunks[-1]


def test_events(api: Api) -> None:
    chunks = api.complete_stream(temperature=0, allowed_token_ids=[70, 71], max_tokens=30, paceline={"events": True})
    told = [chunk["paceline"] for chunk in chunks]
    assert "".join(text for each in told for text in each["token_texts"]) == text_of(chunks)


def test_the_context_can_be_filled_to_the_last_token(api: Api) -> None:
    """The context has 256 tokens; drafts are in flight to the end."""
    fields: dict[str, Any] = {"allowed_token_ids": [70, 71], "ignore_eos": True, "max_tokens": None, **GREEDY}
    answer = api.complete(**fields | {"prompt": [70, 71] * 100, "max_tokens": 56})
    assert answer["usage"]["total_tokens"] == 256
    assert answer["speculation"]["num_accepted_tokens"] > 0
    assert api.complete(**fields | {"prompt": [70] * 255, "max_tokens": 1})["choices"][0]["finish_reason"] == "length"
    for prompt, tokens in (([70] * 256, 1), ([70] * 300, 1), ([70] * 255, 2), ([70] * 250, None)):
        error = api.refused("/v1/completions", fields | {"prompt": prompt, "max_tokens": tokens})
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "x"), ("best_of", 3), ("best_of", 0), ("echo", "yes"), ("response_format", {})]
)
def test_what_is_refused(api: Api, field: str, value: Any) -> None:
    error = api.refused("/v1/completions", {"prompt": "a", field: value})
    assert error["param"].split(".")[0] == field


def test_echo_with_logprobs_as_a_stream_says_what_the_whole_says(api: Api) -> None:
    """The prompt's scores come with its text, before the answer's, for each of several prompts."""
    fields = {"prompt": [[70, 71, 70, 71], [72, 73]], "n": 2, "echo": True, "logprobs": 2, "temperature": 0}
    whole = api.complete(**fields)["choices"]
    chunks = api.complete_stream(**fields)
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[0]["logprobs"]["token_logprobs"][0] is None
        scored = [part["logprobs"] for part in parts if part["logprobs"]]
        for name, values in choice["logprobs"].items():
            said = [value for scores in scored for value in scores[name]]
            if name == "token_logprobs":
                assert said[1:] == pytest.approx(values[1:], abs=1e-5)  # torch may round a row otherwise among others
            elif name == "top_logprobs":
                assert [top and pytest.approx(top, abs=1e-5) for top in said] == values
            else:
                assert said == values
