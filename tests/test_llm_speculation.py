"""`threshold="auto"` in the Python API: the kind of work is found from the prompt, and the answer says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm import KIND_TOKENS
from paceline.types import OFF, Grammar, Speculation
from paceline.work_kinds import WorkKind
from tests.cli.tiny_model import write_model


def test_each_prompt_has_its_kind(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), drafter="ngram", format="fp32", measure_cost=False)
    asked, short = Speculation.of(rule="threshold", threshold="auto"), SamplingParams(max_tokens=1)
    answers = llm.generate(["Hello there", "```\nx = 1\n```"], short, speculation=asked)
    told = [(answer.speculation.kind, answer.speculation.min_likelihood) for answer in answers]
    assert told == [("narrative", 0.5), ("code", 0.75)]
    tokens = llm.encode("a" * 2 * KIND_TOKENS + "```")
    assert llm.resolved(asked, [tokens], structured=False).kind == "code"
    [formed] = llm.generate("Hello", SamplingParams(max_tokens=1, grammar=Grammar.json_object()), speculation=asked)
    assert formed.speculation.kind == "json"


def test_requests_carry_the_kind_by_which_past_drafts_are_told_apart(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), drafter="ngram", format="fp32", measure_cost=False)

    def kind(text: str, speculation: Speculation, **sampling: Any) -> WorkKind | None:
        return llm.request(llm.encode(text), SamplingParams(**sampling), speculation).kind

    assert kind("Hello there", Speculation()) is WorkKind.NARRATIVE
    assert kind("```\nx = 1\n```", Speculation()) is WorkKind.CODE
    assert kind("a" * 4000 + "```", Speculation()) is WorkKind.CODE, "both ends of a long prompt count"
    assert kind("Hello", Speculation(), grammar=Grammar.json_object()) is WorkKind.JSON
    assert kind("Hello", Speculation.of(rule="threshold", threshold="code")) is WorkKind.CODE
    assert kind("Hello", OFF) is None, "nothing is drafted"
    with pytest.raises(InvalidRequest, match="integer token ids"):
        llm.request((1.5,), SamplingParams(), Speculation())  # type: ignore[arg-type]
