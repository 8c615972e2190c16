"""What no step could ever serve is refused at once, and says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import ContextTooLong, InvalidRequest, UnknownOption
from paceline.types import OFF, Request, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import RIGS
from tests.runs import run
from tests.tiny_models import VOCAB, tiny_tokenizer

REQUEST = Request(id="a", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=3))


def engine(**options: Any) -> Rig:
    return build("toy", RIGS["ngram"], max_context=40, eos_ids=(0,), **options)


def refused(request: Request, error: type[InvalidRequest], message: str, *, param: str, **options: Any) -> None:
    rig = engine(**options)
    with pytest.raises(error, match=message) as raised:
        rig.engine.submit(request)
    assert raised.value.param == param
    assert not rig.engine.has_work, "nothing of a refused request stays behind"
    run(rig, [REQUEST])


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"stop_ids": (VOCAB,)}, f"stop id {VOCAB}"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias key {VOCAB}"),
        ({"allowed_tokens": (3, VOCAB + 5)}, f"allowed token {VOCAB + 5}"),
    ],
)
def test_tokens_outside_of_the_vocabulary(params: dict[str, Any], what: str) -> None:
    message = f"{what} is outside of the vocabulary: 0 to {VOCAB - 1} are allowed"
    refused(replace(REQUEST, sampling=SamplingParams(**params)), InvalidRequest, message, param=next(iter(params)))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_prompt_tokens_outside_of_the_vocabulary(token: int) -> None:
    message = f"prompt token {token} is outside of the vocabulary"
    refused(replace(REQUEST, prompt=(1, token)), InvalidRequest, message, param="prompt")


def test_prompts_longer_than_the_context() -> None:
    message = "the prompt has 40 tokens, the context holds 40 .*: shorten the prompt or raise max_context"
    refused(replace(REQUEST, prompt=(1,) * 40), ContextTooLong, message, param="prompt")


def test_an_unknown_drafter() -> None:
    request = replace(REQUEST, speculation=Speculation(drafter="ngrams"))
    refused(request, UnknownOption, "unknown drafter 'ngrams'; did you mean 'ngram'", param="drafter")


def test_stop_strings_need_a_tokenizer() -> None:
    request = replace(REQUEST, sampling=SamplingParams(stop=("x",), max_tokens=3))
    refused(request, InvalidRequest, "stop strings need a tokenizer", param="stop")
    run(engine(tokenizer=tiny_tokenizer()), [request])


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_tokens": (0, 5), "stop_ids": (5,), "min_tokens": 1},
        {"stop_ids": tuple(range(1, VOCAB)), "min_tokens": 1},
    ],
)
def test_nothing_left_to_say(params: dict[str, Any]) -> None:
    request = replace(REQUEST, sampling=SamplingParams(**params))
    message = "every allowed token is a stop token, which min_tokens forbids"
    refused(request, InvalidRequest, message, param="allowed_tokens")


def test_an_id_in_use() -> None:
    rig = engine()
    rig.engine.submit(replace(REQUEST, sampling=SamplingParams(n=2, max_tokens=3)))
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        rig.engine.submit(REQUEST)
    while rig.engine.has_work:
        rig.engine.step()
    run(rig, [REQUEST])


@pytest.mark.parametrize(
    ("speculation", "drafter"),
    [(Speculation(), "ngram"), (Speculation(drafter="ngram-1"), "ngram-1"), (OFF, None)],
)
def test_who_drafts(speculation: Speculation, drafter: str | None) -> None:
    told = run(engine(), [replace(REQUEST, speculation=speculation)])
    assert told["a", 0].stats.drafter == drafter
