"""`threshold="auto"` in the Python API: the kind of work is found from the prompt, and the answer says it."""

from __future__ import annotations

from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.llm import KIND_TOKENS
from paceline.types import Grammar, Speculation
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
