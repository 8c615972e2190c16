"""Requests and parameters: an object that exists is a valid one, and an invalid one says what would be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from paceline.checks import MAX_STOP_LENGTH, MAX_STOPS
from paceline.errors import InvalidRequest, UnknownOption
from paceline.types import MAX_LOGPROBS, MAX_SAMPLES, OFF, Grammar, Request, Rule, SamplingParams, Speculation

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "min_tokens", "max_tokens", "seed", "n", "logprobs", "prompt_logprobs")
LISTS = ("stop", "stop_ids", "allowed_tokens")
FLAGS = ("include_stop", "ignore_eos")


def test_every_field_is_of_a_known_kind() -> None:
    """So that a new one comes under the tests below."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*NUMBERS, *INTEGERS, *LISTS, *FLAGS, "logit_bias", "grammar"}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -101.0, 101.0, True, "1", None, [1.0]])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-(2**63) - 1, 2**64, 1.0, math.nan, True, "1", [1]])
def test_integers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", [5, 1.5, [None], [True], [-1], [[1]], [""], b"ab"])
def test_lists(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"stop|allowed"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_flags(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1e-30}, "temperature must be 0 .* or at least 1e-06, not 1e-30"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], not 0"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], not 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in"),
        ({"max_tokens": -1}, "max_tokens must be between 0 and"),
        ({"n": 0}, f"n must be between 1 and {MAX_SAMPLES}, not 0"),
        ({"n": MAX_SAMPLES + 1}, "n must be between"),
        ({"logprobs": MAX_LOGPROBS + 1}, f"logprobs must be between 0 and {MAX_LOGPROBS}"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is larger than max_tokens 4"),
        ({"logit_bias": {-1: 0.0}}, "a logit_bias key must be between"),
        ({"logit_bias": {"1": 0.0}}, "a logit_bias key must be an integer"),
        ({"logit_bias": {1: math.nan}}, "a logit_bias value must be a finite number"),
        ({"logit_bias": {1: 1001}}, "a logit_bias value must be in"),
        ({"logit_bias": [(1, 1.0)]}, "logit_bias must be a mapping"),
        ({"allowed_tokens": ()}, "allowed_tokens must name at least one token"),
        ({"stop": [""]}, "a stop string must be a non-empty text"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, f"at most {MAX_STOPS} stop strings"),
        ({"stop": ["x" * (MAX_STOP_LENGTH + 1)]}, f"a stop string has {MAX_STOP_LENGTH + 1} characters"),
        ({"stop": ["\ud800"]}, "holds half a surrogate pair, which no text can contain"),
        ({"stop": [1]}, "a stop string must be a non-empty text, not 1"),
    ],
)
def test_the_message_says_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        SamplingParams.of(**given)
    assert error.value.status == 400


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *LISTS, *FLAGS, "logit_bias", "grammar"])
def test_an_error_names_the_field_at_fault(name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{name: object()})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": 1e-30}, "temperature"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_ids": [-1]}, "stop_ids"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"allowed_tokens": ()}, "allowed_tokens"),
        ({"allowed_tokens": [-1]}, "allowed_tokens"),
        ({"grammar": Grammar.json_object(), "ignore_eos": True}, "ignore_eos"),
        ({"grammar": Grammar.json_object(), "allowed_tokens": [1]}, "allowed_tokens"),
    ],
)
def test_so_does_one_of_several_fields_or_of_an_item(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**given)
    assert error.value.param == param


def test_a_grammar_says_that_it_is_the_grammar() -> None:
    for make in (lambda: Grammar("nothing"), lambda: Grammar.regex(""), lambda: Grammar.choice("ab")):
        with pytest.raises(InvalidRequest) as error:
            make()
        assert error.value.param == "grammar"


def test_what_is_valid_is_taken() -> None:
    params = SamplingParams(
        temperature=0.000001,
        top_k=2**31,
        top_p=1e-300,
        min_p=1,
        repetition_penalty=100,
        presence_penalty=-100,
        frequency_penalty=100.0,
        logit_bias={0: -1000, 2**31: 1000.0},
        allowed_tokens=[3, 4],
        min_tokens=7,
        max_tokens=7,
        stop="end",
        stop_ids=[1, 2],
        seed=2**64 - 1,
        n=MAX_SAMPLES,
        logprobs=0,
        prompt_logprobs=MAX_LOGPROBS,
    )
    assert (params.stop, params.stop_ids, params.allowed_tokens) == (("end",), (1, 2), (3, 4))


def test_parameters_keep_no_hand_on_what_was_given() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("given", "edits", "filters"),
    [
        ({}, False, False),
        ({"temperature": 0}, False, False),
        ({"top_k": 1}, False, True),
        ({"top_p": 0.9}, False, True),
        ({"min_p": 0.1}, False, True),
        ({"logit_bias": {1: 1.0}}, True, False),
        ({"allowed_tokens": (1,)}, True, False),
        ({"min_tokens": 1}, True, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"presence_penalty": -0.1}, True, False),
        ({"frequency_penalty": 0.1}, True, False),
    ],
)
def test_what_acts_on_the_logits(given: dict[str, Any], edits: bool, filters: bool) -> None:
    params = SamplingParams(**given)
    assert (params.edits_logits, params.filters) == (edits, filters)


@pytest.mark.parametrize(
    ("cls", "given", "hint"),
    [
        (SamplingParams, "temprature", "did you mean 'temperature'?"),
        (SamplingParams, "topk", "did you mean 'top_k'?"),
        (SamplingParams, "xyzzy", "known: allowed_tokens, "),
        (Speculation, "max_drafts", "did you mean 'max_draft'?"),
    ],
)
def test_unknown_options(cls: Any, given: str, hint: str) -> None:
    with pytest.raises(UnknownOption) as error:
        cls.of(**{given: 1})
    assert f"unknown {cls.__name__} option {given!r}; " in str(error.value)
    assert hint in str(error.value)


def test_speculation() -> None:
    assert Speculation.of(rule="rejection").rule is Rule.REJECTION
    assert not OFF.enabled
    with pytest.raises(UnknownOption, match="unknown rule 'rejecton'; did you mean 'rejection'"):
        Speculation.of(rule="rejecton")
    for given in ({"rule": 3}, {"max_draft": 0}, {"max_draft": 1.5}, {"max_draft": 2000}, {"enabled": 1}):
        with pytest.raises(InvalidRequest) as error:
            Speculation.of(**given)
        assert error.value.param == next(iter(given))
    for threshold in (0, -0.1, 1.1, math.nan, "0.5", True):
        with pytest.raises(InvalidRequest, match="threshold must be"):
            Speculation.of(rule="typical", threshold=threshold)
    with pytest.raises(InvalidRequest, match="rules threshold and typical and confidence, not for block: leave it out"):
        Speculation.of(rule="block", threshold=0.5)
    for p_min in (-0.1, 1.1, math.inf, "0.5"):
        with pytest.raises(InvalidRequest, match="p_min must be"):
            Speculation.of(p_min=p_min)
    for target in (0, -0.04, 601, math.nan, "0.04", True):
        with pytest.raises(InvalidRequest, match="target_tpot must be") as error:
            Speculation.of(target_tpot=target)
        assert error.value.param == "target_tpot"
    assert Speculation.of(target_tpot=0.04).target_tpot == 0.04
    with pytest.raises(InvalidRequest, match="drafter must be a name") as error:
        Speculation(drafter=3)
    assert error.value.param == "drafter"


@pytest.mark.parametrize("prompt", ["text", [1, 2], None, np.array([1]), (1.0,), (True,), (np.int64(3),), ("1",), ()])
def test_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt") as error:
        Request(id="a", prompt=prompt)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("given", ["text", [1, 2], None, (1.0,), (True,), ("1",)])
def test_predictions(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prediction is"):
        Request(id="a", prompt=(1,), prediction=given)


@pytest.mark.parametrize(
    "given",
    [
        {"deadline": -1.0},
        {"deadline": math.nan},
        {"deadline": "soon"},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"id": None},
        {"id": "\udfff"},
    ],
)
def test_requests(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(given))) as error:
        Request(**{"id": "a", "prompt": (1,), **given})
    assert error.value.param == next(iter(given))
