"""`prediction` in the Python API: a text or tokens, one for all prompts or one for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, OFF, SamplingParams
from paceline.errors import InvalidRequest
from tests.cli.tiny_model import write_model

LETTERS = SamplingParams(temperature=1, seed=3, max_tokens=40, allowed_tokens=tuple(range(65, 91)))
PROMPTS = ["abc", "hello"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = write_model(tmp_path_factory.mktemp("model"))
    return LLM(str(path), drafter=[], format="fp32", measure_cost=False)  # none is needed


def test_no_answer_is_changed(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, LETTERS)
    texts, tokens = [answer.text for answer in plain], [answer.tokens for answer in plain]
    for prediction in (texts[0], tokens[1], texts, tokens, [texts[1], None]):
        answers = llm.generate(PROMPTS, LETTERS, prediction=prediction)
        assert [answer.text for answer in answers] == texts
    [first] = llm.generate(PROMPTS[0], LETTERS, prediction=texts[0])
    assert first.stats.drafter == "prediction"
    assert first.stats.prediction_accepted > 30
    assert [answer.stats.prediction_accepted > 30 for answer in answers] == [False, False]  # the wrong one, and none


def test_streams_and_chats_have_one_too(llm: LLM) -> None:
    [plain] = llm.generate(PROMPTS[:1], LETTERS)
    events = list(llm.stream(PROMPTS[0], LETTERS, prediction=plain.text))
    assert "".join(event.text for event in events) == plain.text
    assert sum(event.accepted for event in events if event.drafter == "prediction") > 30
    messages = [{"role": "user", "content": "hi"}]
    said = llm.chat(messages, LETTERS)
    again = llm.chat(messages, LETTERS, prediction=said.text)
    assert again.text == said.text
    assert again.stats.prediction_accepted > 30


def test_without_speculation_it_has_no_say(llm: LLM) -> None:
    [answer] = llm.generate("abc", LETTERS, speculation=OFF, prediction="xyz")
    assert answer.stats.drafter is None
    assert answer.stats.off_reason == "off by request"


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (["a", "b", "c"], "3 predictions for 2 prompts"),
        ([[1], [10**6]], "prediction token 1000000 is outside of the vocabulary"),
        ("x" * 5000, "the prediction has 5000 tokens, the context holds"),
    ],
)
def test_what_cannot_be_served(llm: LLM, prediction: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(PROMPTS, LETTERS, prediction=prediction)
    llm.engine.check()
